"""PixArt: sizes and operations as measured on diffusers' model, numbers as it computes them."""

import pytest
import torch

import model_specs
from megatron_pulse.profile.flops import count_flops
from megatron_pulse.profile.parameters import count_parameters
from tests.model_specs.chains import build_chain, perturb, relative_error
from tests.model_specs.parity import assert_same_numbers
from tests.model_specs.twins import Twin


@pytest.mark.parametrize(
    ("name", "parameters"), [("pixart-sigma", 610_856_096), ("pixart-alpha", 611_349_152)]
)
def test_published_sizes(name, parameters):
    """As diffusers' models: 0.6 B in both papers."""
    backbone = model_specs.load_backbone(name)
    assert sum(count_parameters(backbone)) == parameters
    assert backbone.skips == ()
    assert [layer.name for layer in backbone.layers] == [
        "adaln_single",
        "caption_projection",
        "pos_embed",
        *(f"transformer_blocks.{i}.{part}" for i in range(28) for part in ("attn1", "attn2", "ff")),
        "head",
    ]
    assert [(edge.name, len(edge.consumers)) for edge in backbone.conditioning] == [
        ("t6", 56),
        ("embedded_timestep", 1),
        ("caption", 28),
    ]


@pytest.mark.parametrize(
    ("sample_size", "patches", "block", "head"),
    [
        (32, (9437184, 18874368), (11761090560, 23850123264), (18874368, 37748736)),
        (128, (150994944, 301989888), (236767150080, 515020161024), (301989888, 603979776)),
    ],
)
def test_operations_and_boundaries_are_those_measured(sample_size, patches, block, head):
    """Counted on diffusers' units and on what they share, with flash attention."""
    backbone = model_specs.load_backbone(
        "pixart-sigma", {"num_layers": 1, "sample_size": sample_size}
    )
    counted = [(flops.forward, flops.backward) for flops in count_flops(backbone)]
    adaln, caption, counted_patches, *counted_block, counted_head = counted
    assert counted_patches == patches
    assert tuple(map(sum, zip(*counted_block, strict=True))) == block
    assert counted_head == head
    assert adaln[0] + caption[0] == 332985434112 - 329338847232
    numbers = [[spec.numel_per_sample for spec in layer.outputs] for layer in backbone.layers]
    assert numbers[2:-1] == 4 * [[1152 * (sample_size // 2) ** 2]]
    provided = {edge.name: edge.spec.numel_per_sample for edge in backbone.conditioning}
    assert provided == {"t6": 6912, "embedded_timestep": 1152, "caption": 300 * 1152}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_additional_conditions": True, "out_channels": 4},
        {"sample_size": 128, "patch_size": 16},
        {"interpolation_scale": 3},
    ],
)
def test_same_numbers_as_diffusers(options, one_rank):
    """About half of the words are masked out."""
    patch = options.get("patch_size", 2)
    options = {**options, "buckets": ",".join(
        f"{patch * rows}x{patch * columns}" for rows, columns in ((4, 4), (4, 2), (2, 6))
    )}  # fmt: skip
    chain = build_chain(model_specs.load_backbone("pixart-tiny", options), torch.float64)
    assert_same_numbers(chain, 1e-10, run_chooses=["caption_length"])


def test_masks_are_diffusers(one_rank):
    """Masked words change nothing, and a caption whose words are all masked is seen whole."""
    from megatron_pulse.backbone.published_weights import to_published

    chain = build_chain(model_specs.load_backbone("pixart-tiny"), torch.float64)
    perturb(chain.parameters().values())
    twin = Twin(chain.backbone, torch.float64)
    twin.module.load_state_dict(to_published(twin.published, chain.state()))
    image, fields = chain.batch(3)
    fields["context_mask"] = torch.tensor([[1] * 4 + [0] * 6, [1] * 10, [0] * 10])
    prediction = chain(image, fields)
    assert relative_error(prediction, twin(image, fields)) < 1e-10
    other = fields["context"].clone()
    other[:, 4:] += 1
    changed = (chain(image, {**fields, "context": other}) - prediction).flatten(1).abs().amax(1)
    assert changed[0] == 0
    assert changed[1] > 0 and changed[2] > 0


def test_configurations_that_are_published():
    """Sigma's folder has the older class name; the caption's length is told from the rest."""
    folder = {
        "_class_name": "Transformer2DModel", "_diffusers_version": "0.28.0",
        "activation_fn": "gelu-approximate", "attention_bias": True, "attention_head_dim": 72,
        "attention_type": "default", "caption_channels": 4096, "cross_attention_dim": 1152,
        "dropout": 0.0, "in_channels": 4, "interpolation_scale": None,
        "norm_elementwise_affine": False, "norm_eps": 1e-06, "norm_type": "ada_norm_single",
        "num_attention_heads": 16, "num_embeds_ada_norm": 1000, "num_layers": 28,
        "out_channels": 8, "patch_size": 2, "sample_size": 128, "use_additional_conditions": False,
    }  # fmt: skip
    sigma = model_specs.load_backbone("pixart-sigma")
    assert model_specs.load_published(folder).record == sigma.record
    alpha = model_specs.load_published({**folder, "use_additional_conditions": None})
    assert alpha.record == model_specs.load_backbone("pixart-alpha").record
    wrong = {"caption_channels": None, "cross_attention_dim": 768, "attention_type": "gated"}
    with pytest.raises(ValueError, match=r"\(3 faults\)") as caught:
        model_specs.load_published({**folder, **wrong})
    for fault in (
        "attention_type is 'gated'",
        "cross_attention_dim is 768; only 1152",
        "projected",
    ):
        assert fault in str(caught.value)


def test_initialisation_is_pixarts(one_rank):
    """The caption has no influence and the prediction is 0."""
    options = {"num_attention_heads": 16, "use_additional_conditions": True}
    backbone = model_specs.load_backbone("pixart-tiny", options)
    chain = build_chain(backbone)
    image, fields = chain.batch(2)
    assert chain(image, fields).abs().max() == 0
    parameters = chain.parameters()
    dim = 192
    for name, fans in (
        ("attn1.attention.linear_qkv", 4 * dim),
        ("attn1.attention.linear_proj", 2 * dim),
        ("attn2.attention.linear_q", 2 * dim),
        ("attn2.attention.linear_kv", 3 * dim),
        ("ff.mlp.linear_fc1", 5 * dim),
        ("ff.mlp.linear_fc2", 5 * dim),
    ):
        weight = parameters[f"transformer_blocks.1.{name}.weight"]
        assert weight.abs().max().item() == pytest.approx((6 / fans) ** 0.5, rel=0.01)
    assert parameters["transformer_blocks.1.attn2.attention.linear_proj.weight"].abs().max() == 0
    for name in (
        "adaln_single.emb.timestep_embedder.linear_2",
        "adaln_single.emb.aspect_ratio_embedder.linear_2",
        "adaln_single.linear",
        "caption_projection.linear_1",
        "caption_projection.linear_2",
    ):
        assert parameters[f"{name}.weight"].std().item() == pytest.approx(0.02, rel=0.05), name
    for name, parameter in parameters.items():
        if name.endswith("scale_shift_table"):
            assert parameter.std().item() == pytest.approx(dim**-0.5, rel=0.15), name
        if name.endswith("bias"):
            assert parameter.abs().max() == 0, name


def test_faulty_sizes_are_listed():
    options = {"sample_size": 9, "attention_head_dim": 5, "use_additional_conditions": True}
    with pytest.raises(ValueError, match=r"(?s)divisible by 12, is 80.*patch_size=2, is 9"):
        model_specs.load_backbone("pixart-sigma", options)
    with pytest.raises(ValueError, match="interpolation_scale: must be positive, is 0"):
        model_specs.load_backbone("pixart-sigma", {"interpolation_scale": 0})
