"""DiT: sizes and operations as measured on diffusers' model, numbers as it computes them."""

import pytest
import torch

import model_specs
from megatron_pulse.profile.flops import count_flops
from megatron_pulse.profile.parameters import count_parameters
from tests.model_specs.chains import build_chain
from tests.model_specs.parity import assert_same_numbers


def test_published_size():
    """As diffusers' model: 750 M with an embedder in every block (the paper shares one: 675 M)."""
    backbone = model_specs.load_backbone("dit-xl-2")
    assert sum(count_parameters(backbone)) == 749_826_464
    assert backbone.skips == ()
    assert [layer.name for layer in backbone.layers] == [
        "embedding",
        "pos_embed",
        *(f"transformer_blocks.{i}.{part}" for i in range(28) for part in ("attn1", "ff")),
        "head",
    ]
    (temb,) = backbone.conditioning
    assert [backbone.layers[i].name for i in temb.consumers] == [
        "transformer_blocks.0.attn1",
        "head",
    ]


@pytest.mark.parametrize(
    ("sample_size", "patches", "block", "head"),
    [
        (32, (9437184, 18874368), (8474886144, 17100177408), (24182784, 48365568)),
        (64, (37748736, 75497472), (37465915392, 77347160064), (80805888, 161611776)),
        (128, (150994944, 301989888), (207788212224, 454230540288), (307298304, 614596608)),
    ],
)
def test_operations_and_boundaries_are_those_measured(sample_size, patches, block, head):
    """Counted on diffusers' units, forward and backward, with flash attention.

    Block 0 is its two layers and ``embedding``. The modulation between a block's layers comes on
    top of the block's own boundary.
    """
    backbone = model_specs.load_backbone("dit-xl-2", {"num_layers": 2, "sample_size": sample_size})
    counted = [(flops.forward, flops.backward) for flops in count_flops(backbone)]
    embedding, counted_patches, attn0, ff0, attn1, ff1, counted_head = counted
    assert counted_patches == patches
    assert tuple(map(sum, zip(embedding, attn0, ff0, strict=True))) == block
    assert tuple(map(sum, zip(attn1, ff1, strict=True))) == block
    assert counted_head == head
    numbers = [[spec.numel_per_sample for spec in layer.outputs] for layer in backbone.layers]
    tokens = 1152 * (sample_size // 2) ** 2
    assert numbers[1:-1] == [[tokens], [tokens, 3 * 1152], [tokens], [tokens, 3 * 1152], [tokens]]


@pytest.mark.parametrize("options", [{}, {"out_channels": 4, "patch_size": 4, "sample_size": 16}])
def test_same_numbers_as_diffusers(options, one_rank):
    """diffusers drops labels in training mode; here that is the data's business."""
    backbone = model_specs.load_backbone("dit-tiny", {**options, "buckets": "16x16,4x16,16x4"})
    assert_same_numbers(build_chain(backbone, torch.float64), 1e-10)


def test_configurations_that_are_published():
    """The folder facebook/DiT-XL-2-512 has the older class name, and keys that mean nothing."""
    folder = {
        "_class_name": "Transformer2DModel", "_diffusers_version": "0.12.0.dev0",
        "activation_fn": "gelu-approximate", "attention_bias": True, "attention_head_dim": 72,
        "cross_attention_dim": None, "dropout": 0.0, "in_channels": 4,
        "norm_elementwise_affine": False, "norm_num_groups": 32, "norm_type": "ada_norm_zero",
        "num_attention_heads": 16, "num_embeds_ada_norm": 1000, "num_layers": 28,
        "out_channels": 8, "patch_size": 2, "sample_size": 64, "upcast_attention": False,
    }  # fmt: skip
    backbone = model_specs.load_published(folder)
    assert backbone.record["name"] == "dit-xl-2"
    expected = model_specs.load_backbone("dit-xl-2", {"sample_size": 64})
    assert backbone.record["options"] == expected.record["options"]
    assert model_specs.load_published({**folder, "out_channels": None}).output_spec.shape[0] == 4
    with pytest.raises(ValueError, match=r"(?s)2 faults.*dropout is 0.1.*norm_eps is 1e-06; only"):
        model_specs.load_published({**folder, "dropout": 0.1, "norm_eps": 1e-6})


def test_initialisation_is_dits(one_rank):
    """adaLN-zero: every block is the identity and the prediction 0."""
    backbone = model_specs.load_backbone(
        "dit-tiny", {"num_attention_heads": 16, "sample_size": 4, "num_classes": 1000}
    )
    chain = build_chain(backbone)
    image, fields = chain.batch(2)
    assert chain(image, fields).abs().max() == 0
    (tokens,) = chain.modules[1]((image,), {}, {})
    labels_and_times = {name: fields[name] for name in ("timesteps", "labels")}
    after, modulation = chain.modules[4]((tokens,), {}, labels_and_times)
    assert torch.equal(after, tokens)
    assert torch.equal(chain.modules[5]((after, modulation), {}, {})[0], tokens)

    parameters = chain.parameters()
    dim = 128
    for name, fans in (
        ("pos_embed.proj", dim + 16),
        ("transformer_blocks.1.attn1.attention.linear_qkv", 4 * dim),
        ("transformer_blocks.1.attn1.attention.linear_proj", 2 * dim),
        ("transformer_blocks.1.ff.mlp.linear_fc1", 5 * dim),
        ("transformer_blocks.1.ff.mlp.linear_fc2", 5 * dim),
    ):
        bound = (6 / fans) ** 0.5
        assert parameters[f"{name}.weight"].abs().max().item() == pytest.approx(bound, rel=0.01)
        assert parameters[f"{name}.bias"].abs().max() == 0
    for name in ("timestep_embedder.linear_1", "class_embedder.embedding_table"):
        for layer in ("embedding", "transformer_blocks.1.attn1"):
            weight = parameters[f"{layer}.emb.{name}.weight"]
            assert weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_faulty_sizes_are_listed():
    options = {"sample_size": 9, "attention_head_dim": 3, "num_attention_heads": 2}
    with pytest.raises(ValueError, match=r"(?s)divisible by 4, is 6.*patch_size=2, is 9"):
        model_specs.load_backbone("dit-xl-2", options)
    with pytest.raises(ValueError, match="num_layers: must be at least 1, is 0"):
        model_specs.load_backbone("dit-xl-2", {"num_layers": 0})
