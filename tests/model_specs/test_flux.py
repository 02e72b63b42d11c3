"""Flux: sizes and operations as measured on diffusers' model, numbers as it computes them."""

import pytest
import torch

import model_specs
from megatron_pulse.profile.flops import count_flops
from megatron_pulse.profile.parameters import count_parameters
from tests.model_specs.chains import build_chain, perturb, relative_error
from tests.model_specs.parity import assert_same_numbers
from tests.model_specs.twins import Twin

DIM = 3072


@pytest.mark.parametrize(
    ("name", "parameters"), [("flux-dev", 11_901_408_320), ("flux-schnell", 11_891_178_560)]
)
def test_published_sizes(name, parameters):
    """As diffusers' models from the published config.json files."""
    from diffusers import FluxTransformer2DModel

    backbone = model_specs.load_backbone(name)
    assert sum(count_parameters(backbone)) == parameters
    with torch.device("meta"):
        reference = FluxTransformer2DModel(**model_specs.published_form(backbone).config)
    assert sum(p.numel() for p in reference.parameters()) == parameters
    layers = [layer.name for layer in backbone.layers]
    assert layers == [
        "time_text_embed",
        "x_embedder",
        "context_embedder",
        *(f"transformer_blocks.{i}" for i in range(19)),
        *(f"single_transformer_blocks.{i}" for i in range(38)),
        "head",
    ]
    assert backbone.skips == ()
    assert ("guidance" in backbone.batch_fields) == (name == "flux-dev")
    (temb,) = backbone.conditioning
    assert [layers[i] for i in temb.consumers] == layers[3:]
    assert [len(layer.outputs) for layer in backbone.layers] == [1, 1, *[2] * 57, 1, 1]


@pytest.mark.parametrize(
    ("sample_size", "embedding", "double", "single", "head"),
    [
        (32, (12985565184, 13086228480), (181420425216, 366464729088),
         (181250555904, 366124990464), (138412032, 276824064)),
        (64, (13287555072, 13690208256), (377109872640, 768715259904),
         (376940003328, 768375521280), (440401920, 880803840)),
        (128, (14495514624, 16106127360), (1304822808576, 2740105248768),
         (1304652939264, 2739765510144), (1648361472, 3296722944)),
    ],
)  # fmt: skip
def test_operations_and_boundaries_are_those_measured(sample_size, embedding, double, single, head):
    """Counted on diffusers' units, forward and backward, with flash attention.

    Its embedding unit is our ``x_embedder`` and ``context_embedder``. Its last block computes the
    text's MLP and last projection, 512 tokens times (4 + 5) D^2 weights, which nothing uses.
    """
    options = {"num_layers": 1, "num_single_layers": 2, "sample_size": sample_size}
    backbone = model_specs.load_backbone("flux-dev", options)
    counted = [(flops.forward, flops.backward) for flops in count_flops(backbone)]
    assert counted[0] == (64487424, 121110528)
    assert tuple(map(sum, zip(*counted[1:3], strict=True))) == embedding
    unused = 2 * 512 * 9 * DIM**2
    last = (single[0] - unused, single[1] - 2 * unused)
    assert counted[3:] == [double, single, last, head]
    image, text = DIM * (sample_size // 2) ** 2, DIM * 512
    numbers = [[spec.numel_per_sample for spec in layer.outputs] for layer in backbone.layers]
    assert numbers[1:-1] == [[image], [image, text], [image, text], [image, text], [image]]


@pytest.mark.parametrize("guidance", [True, False])
def test_same_numbers_as_diffusers(guidance, one_rank):
    """Output and every gradient, to rounding, with the same weights (fp32: ``test_twins``).

    Both turn queries and keys in fp32, whatever the dtype; ours adds up the gradients there too.
    """
    options = {"guidance_embeds": guidance, "buckets": "8x8,8x4,4x12"}
    backbone = model_specs.load_backbone("flux-tiny", options)
    assert_same_numbers(
        build_chain(backbone, torch.float64),
        1e-10,
        run_chooses=("context_length", "sample_size"),
        gradient_tolerance=2e-6,
    )


def test_scalars_keep_fp32_under_bf16(one_rank):
    """As in an fp32 run up to the weights' rounding; diffusers' bf16 embeds other scalars."""
    backbone = model_specs.load_backbone("flux-tiny")
    half, whole = (build_chain(backbone, d).modules[0] for d in (torch.bfloat16, torch.float32))
    perturb(half.parameters())
    whole.load_state_dict(half.state_dict())
    pooled = torch.randn(2, 20, dtype=torch.bfloat16)
    fields = {"timesteps": torch.tensor([123.4, 987.6]), "guidance": torch.tensor([3.5, 3.5])}
    (ours,) = half((), {}, {**fields, "pooled": pooled})
    (exact,) = whole((), {}, {**fields, "pooled": pooled.float()})
    assert relative_error(ours.float(), exact) < 1e-2
    twin = Twin(backbone, torch.bfloat16)
    reference = twin.module
    reference.time_text_embed.load_state_dict(half.state_dict())
    seen = []
    reference.time_text_embed.register_forward_hook(lambda m, i, out: seen.append(out))
    image = torch.randn(2, 4, 8, 8, dtype=torch.bfloat16)
    context = torch.randn(2, 6, 24, dtype=torch.bfloat16)
    twin(image, {**fields, "pooled": pooled, "context": context})
    assert relative_error(seen[0].float(), exact) > 2e-2


def test_fp16_stays_within_its_range(one_rank):
    """diffusers clips the text after double blocks, and both streams after single ones."""
    chain = build_chain(model_specs.load_backbone("flux-tiny"), torch.float16)
    image, text = (torch.randn(n, 1, 32).half() for n in (16, 6))
    double, single = chain.modules[3], chain.modules[5]
    with torch.no_grad():
        for linear, bias in (
            (double.norm1_context.linear, double.ff_context.linear_fc2.bias),
            (single.norm.linear, single.proj_out_attn.bias),
        ):
            linear.bias[-32:] = 60000.0  # the last gate
            bias[0], bias[1] = 8.0, -8.0
    temb = {"temb": torch.zeros(1, 32, dtype=torch.float16)}
    double_image, double_text = double((image, text), {}, temb)
    assert torch.equal(double_image, image)
    for clipped in (double_text, *single((image, text), {}, temb)):
        assert (clipped[..., 0] == 65504).all() and (clipped[..., 1] == -65504).all()


def test_configurations_that_are_published():
    """The folders of FLUX.1-dev and -schnell, older than ``axes_dims_rope``."""
    folder = {
        "_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.30.0.dev0",
        "_name_or_path": "../checkpoints/flux-dev/transformer", "attention_head_dim": 128,
        "guidance_embeds": True, "in_channels": 64, "joint_attention_dim": 4096,
        "num_attention_heads": 24, "num_layers": 19, "num_single_layers": 38, "patch_size": 1,
        "pooled_projection_dim": 768,
    }  # fmt: skip
    assert model_specs.load_published(folder).record["name"] == "flux-dev"
    schnell = model_specs.load_published({**folder, "guidance_embeds": False})
    assert schnell.record["name"] == "flux-schnell"
    message = r"(?s)2 faults.*patch_size is 2; only 1.*out_channels is 64; only 384"
    with pytest.raises(ValueError, match=message):
        faulty = {**folder, "patch_size": 2, "in_channels": 384, "out_channels": 64}
        model_specs.load_published(faulty)
    with pytest.raises(ValueError, match="in_channels is 63; only 'a multiple of 4'"):
        model_specs.load_published({**folder, "in_channels": 63})


def test_every_fault_of_the_options_is_listed():
    with pytest.raises(ValueError, match="2 fault") as caught:
        model_specs.load_backbone("flux-tiny", {"attention_head_dim": 16, "sample_size": 7})
    words = ("sample_size: must be divisible by 2", "must add up to attention_head_dim=16")
    assert all(word in str(caught.value) for word in words)
    with pytest.raises(ValueError, match="three even numbers"):
        model_specs.load_backbone("flux-tiny", {"axes_dims_rope": "3,1,4"})


def test_initialisation_is_dits(one_rank):
    """adaLN-zero: every block is the identity and the prediction 0.

    A single block's last projection is drawn as the one matrix [D, 5D] that it is.
    """
    options = {"attention_head_dim": 64, "joint_attention_dim": 512, "pooled_projection_dim": 512}
    options |= {"axes_dims_rope": "16,24,24", "in_channels": 16}
    backbone = model_specs.load_backbone("flux-tiny", options)
    chain = build_chain(backbone)
    assert chain(*chain.batch(2)).abs().max() == 0
    for name, parameter in chain.parameters().items():
        if "norm1" in name or "norm.linear" in name or name.startswith("head"):
            assert parameter.abs().max() == 0, name
        elif "layernorm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert parameter.abs().max() == 0, name
        else:
            rows, columns = parameter.shape
            columns = 5 * 256 if "proj_out" in name else columns
            xavier = (2 / (rows + columns)) ** 0.5
            std = 0.02 if name.startswith("time_text_embed") else xavier
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
