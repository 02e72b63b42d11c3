"""SD3: sizes and operations as measured on diffusers' model, numbers as it computes them."""

import pytest
import torch

import model_specs
from megatron_pulse.backbone.published_weights import to_published
from megatron_pulse.profile.flops import count_flops
from megatron_pulse.profile.parameters import count_parameters
from tests.model_specs.chains import build_chain
from tests.model_specs.parity import assert_same_numbers, from_published

DUAL = {"qk_norm": True, "dual_attention_layers": [0, 2]}


@pytest.mark.parametrize(
    ("name", "parameters", "blocks"),
    [
        ("sd3-medium", 2_028_328_000, 24),
        ("sd3.5-medium", 2_243_171_520, 24),
        ("sd3.5-large", 8_056_627_520, 38),
    ],
)
def test_published_sizes(name, parameters, blocks):
    """As diffusers' models from the published config.json files."""
    from diffusers import SD3Transformer2DModel

    backbone = model_specs.load_backbone(name)
    assert sum(count_parameters(backbone)) == parameters
    with torch.device("meta"):
        reference = SD3Transformer2DModel(**model_specs.published_form(backbone).config)
    assert sum(p.numel() for p in reference.parameters()) == parameters
    layers = [layer.name for layer in backbone.layers]
    assert layers == [
        "time_text_embed",
        "pos_embed",
        "context_embedder",
        *(f"transformer_blocks.{i}" for i in range(blocks)),
        "head",
    ]
    assert backbone.skips == ()
    (temb,) = backbone.conditioning
    assert [layers[i] for i in temb.consumers] == layers[3:]
    assert [len(layer.outputs) for layer in backbone.layers] == [1, 1, *[2] * blocks, 1, 1]


@pytest.mark.parametrize(
    ("sample_size", "embedding", "block", "last", "head"),
    [
        (32, (1988100096, 2038431744), (24304902144, 49126207488), (17746059264, 36008521728),
         (59768832, 119537664)),
        (64, (2139095040, 2340421632), (75284570112, 154832105472), (68725727232, 141714419712),
         (210763776, 421527552)),
        (128, (2743074816, 3548381184), (351680815104, 758849630208), (345121972224, 745731944448),
         (814743552, 1629487104)),
    ],
)  # fmt: skip
def test_operations_and_boundaries_are_those_measured(sample_size, embedding, block, last, head):
    """Counted on diffusers' units, forward and backward, with flash attention.

    Its embedding unit is our ``pos_embed`` and ``context_embedder``.
    """
    options = {"num_layers": 3, "sample_size": sample_size}
    backbone = model_specs.load_backbone("sd3-medium", options)
    counted = [(flops.forward, flops.backward) for flops in count_flops(backbone)]
    assert counted[0] == (16515072, 25952256)
    assert tuple(map(sum, zip(*counted[1:3], strict=True))) == embedding
    assert counted[3:] == [block, block, last, head]
    image, text = 1536 * (sample_size // 2) ** 2, 1536 * 154
    numbers = [[spec.numel_per_sample for spec in layer.outputs] for layer in backbone.layers]
    assert numbers[1:-1] == [[image], [image, text], [image, text], [image, text], [image]]


@pytest.mark.parametrize("options", [{}, DUAL], ids=["sd3", "sd3.5"])
def test_same_numbers_as_diffusers(options, one_rank):
    """Output and every gradient, to rounding, with the same weights, at every size.

    diffusers computes the variance in its RMSNorm in fp32, whatever the dtype; ours does not.
    """
    tolerance = 3e-6 if options else 1e-10
    options = {**options, "buckets": "8x8,8x4,4x12"}
    chain = build_chain(model_specs.load_backbone("sd3-tiny", options), torch.float64)
    assert_same_numbers(chain, tolerance, run_chooses=("context_length",))


def test_smaller_latents_see_the_centre_of_the_positions(one_rank):
    """As diffusers given latents smaller than its sample_size, and not square in the table."""
    from diffusers import SD3Transformer2DModel

    options = {"sample_size": 4, "pos_embed_max_size": 7, "buckets": "4x4,6x14"}
    backbone = model_specs.load_backbone("sd3-tiny", options)
    settings = model_specs.published_form(backbone).config
    assert settings["sample_size"] == 8
    reference = SD3Transformer2DModel(**settings)
    chain = build_chain(backbone)
    assert torch.equal(chain.state()["pos_embed.pos_embed"], reference.pos_embed.pos_embed)
    run_chooses = ("context_length", "sample_size")
    assert_same_numbers(chain, 1e-5, run_chooses=run_chooses)


def test_positions_are_carried_as_they_came(one_rank):
    """In fp32 through a cast to bf16, in and out, whatever they were."""
    backbone = model_specs.load_backbone("sd3-tiny")
    published = model_specs.published_form(backbone)
    theirs = to_published(published, build_chain(backbone).state())
    positions = torch.randn(theirs["pos_embed.pos_embed"].shape)
    theirs["pos_embed.pos_embed"] = positions
    chain = build_chain(backbone, torch.bfloat16)
    ours = from_published(published, chain.state(), theirs, "theirs")
    module = chain.modules[1].bfloat16()
    assert {name: tensor.dtype for name, tensor in module.state_dict().items()} == {
        "pos_embed": torch.float32,
        "proj.weight": torch.bfloat16,
        "proj.bias": torch.bfloat16,
    }
    names = {name.removeprefix("pos_embed.") for name in ours if name.startswith("pos_embed.")}
    assert names == set(module.state_dict())
    module.load_state_dict({name: ours[f"pos_embed.{name}"] for name in names})
    exported = to_published(published, chain.state())
    assert torch.equal(exported["pos_embed.pos_embed"], positions)
    assert module.double().pos_embed.dtype == torch.float64


def test_configurations_that_are_published():
    """stabilityai/stable-diffusion-3-medium-diffusers is older than the settings of SD3.5."""
    folder = {
        "_class_name": "SD3Transformer2DModel", "_diffusers_version": "0.29.0.dev0",
        "attention_head_dim": 64, "caption_projection_dim": 1536, "in_channels": 16,
        "joint_attention_dim": 4096, "num_attention_heads": 24, "num_layers": 24,
        "out_channels": 16, "patch_size": 2, "pooled_projection_dim": 2048,
        "pos_embed_max_size": 192, "sample_size": 128,
    }  # fmt: skip
    assert model_specs.load_published(folder).record["name"] == "sd3-medium"
    medium = {**folder, "qk_norm": "rms_norm", "pos_embed_max_size": 384}
    medium["dual_attention_layers"] = list(range(13))
    assert model_specs.load_published(medium).record["name"] == "sd3.5-medium"
    assert model_specs.load_published({**folder, "out_channels": None}).output_spec.shape[0] == 16
    message = r"(?s)2 faults.*caption_projection_dim is 1152; only 1536.*only 'rms_norm'"
    with pytest.raises(ValueError, match=message):
        faulty = {**folder, "caption_projection_dim": 1152, "qk_norm": "layer_norm"}
        model_specs.load_published(faulty)


def test_every_fault_of_the_options_is_listed():
    with pytest.raises(ValueError, match="3 fault") as caught:
        model_specs.load_backbone(
            "sd3-tiny", {"attention_head_dim": 7, "sample_size": 15, "dual_attention_layers": [3]}
        )
    words = ("sample_size: must be divisible", "pos_embed_max_size=6", "among the 3 blocks")
    assert all(word in str(caught.value) for word in words)
    with pytest.raises(ValueError, match="divisible by 4, is 9"):
        model_specs.load_backbone("sd3-tiny", {"attention_head_dim": 3, "num_attention_heads": 3})


def test_initialisation_is_dits(one_rank):
    """adaLN-zero: every block is the identity and the prediction 0."""
    options = {"attention_head_dim": 64, "joint_attention_dim": 512, "pooled_projection_dim": 512}
    backbone = model_specs.load_backbone("sd3-tiny", {**options, **DUAL, "num_layers": 3})
    chain = build_chain(backbone)
    assert chain(*chain.batch(2)).abs().max() == 0
    for name, parameter in chain.parameters().items():
        if "norm1" in name or name.startswith("head") or name.endswith("bias"):
            assert parameter.abs().max() == 0, name
        elif "layernorm" in name:
            assert (parameter == 1).all(), name
        else:
            rows, columns = parameter.flatten(1).shape
            xavier = (2 / (rows + columns)) ** 0.5
            std = 0.02 if name.startswith("time_text_embed") else xavier
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
