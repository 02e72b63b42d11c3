"""A model at another size or text length than its own: the same model, as diffusers runs it."""

import json
from dataclasses import replace

import diffusers
import pytest
import torch
from diffusers.models.normalization import FP32LayerNorm

from megatron_pulse.backbone.published_weights import to_published
from megatron_pulse.backbone.shape_buckets import at_shape
from model_specs import (
    compare_models,
    continue_model,
    load_backbone,
    load_published,
    published_form,
)
from model_specs.common.options import OptionError
from tests.model_specs.chains import build_chain, relative_error
from tests.model_specs.parity import from_published
from tests.model_specs.twins import call

# The published model's options, what the run chooses.
CASES = {
    "sd": ("sd-tiny", {}, {"sample_size": 24, "context_length": 9}),
    "sdxl": ("sdxl-tiny", {}, {"sample_size": 8, "context_length": 5}),
    "hunyuan": ("hunyuan-tiny", {"style_and_size": True}, {"sample_size": 14}),
    "dit up": ("dit-tiny", {}, {"sample_size": 20}),
    "dit down": ("dit-tiny", {"sample_size": 16}, {"sample_size": 4}),
    "pixart up": ("pixart-tiny", {"sample_size": 64, "patch_size": 16},
                  {"sample_size": 192, "caption_length": 4}),
    "pixart down": ("pixart-tiny", {"sample_size": 128, "patch_size": 16}, {"sample_size": 96}),
    "pixart scaled": ("pixart-tiny", {"interpolation_scale": 0.5}, {"sample_size": 12}),
    "sd3": ("sd3-tiny", {}, {"sample_size": 12, "context_length": 3}),
    "sd3 down": ("sd3-tiny", {}, {"sample_size": 4}),
    "flux": ("flux-tiny", {}, {"sample_size": 12, "context_length": 4}),
}  # fmt: skip


def reference_of(backbone, dtype):
    published = published_form(backbone)
    torch.manual_seed(3)
    model = getattr(diffusers, published.class_name)(**published.config)
    for parameter in model.parameters():  # gates that begin at zero would hide everything
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def chain_of(backbone, reference, dtype):
    """The chain of ``backbone`` with the weights of ``reference``."""
    chain = build_chain(backbone, dtype)
    published = published_form(backbone)
    weights = from_published(published, chain.state(), reference.state_dict(), "reference")
    for name, tensor in chain.state().items():
        tensor.copy_(weights[name])
    return chain


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 3e-6), (torch.float32, 1e-5)])
@torch.no_grad()
def test_another_size_is_as_diffusers_computes_it(case, dtype, tolerance, one_rank, monkeypatch):
    """The diffusers model of the published size is given the other; so is what is exported.

    In fp64 diffusers computes parts of Flux in fp32; the rest agrees to 1e-10.
    """
    name, native, chosen = CASES[case]
    if dtype == torch.float64:
        monkeypatch.setattr(FP32LayerNorm, "forward", torch.nn.LayerNorm.forward)
        tolerance = tolerance if name == "flux-tiny" else 1e-10
    there = load_published(with_class(published_form(load_backbone(name, native))))
    reference = reference_of(there, dtype)
    here = continue_model(there.record, name, {**native, **chosen})
    compared = compare_models(there.record, here.record)
    assert compared.different == ()
    assert set(chosen) <= {text.split()[0] for text in compared.changed}

    chain = chain_of(here, reference, dtype)
    image, fields = chain.batch(2)
    assert image.shape[-1] == chosen["sample_size"]
    ours, theirs = chain(image, fields), call(reference, image, fields)
    assert relative_error(ours, theirs) < tolerance

    exported = reference_of(here, dtype)
    exported.load_state_dict(to_published(published_form(here), chain.state()))
    assert torch.equal(call(exported, image, fields), theirs)
    again = load_published(with_class(published_form(here)))
    assert compare_models(there.record, again.record).different == ()


def with_class(published):
    return {**published.config, "_class_name": published.class_name}


@pytest.mark.parametrize(("case", "least"), [("dit up", 0.05), ("pixart down", 0.05)])
@torch.no_grad()
def test_positions_built_for_the_other_size_are_another_function(case, least, one_rank):
    """compare_models would have to refuse the sizes if the spacing were not the model's."""
    name, native, chosen = CASES[case]
    there, alone = load_backbone(name, native), load_backbone(name, {**native, **chosen})
    here = continue_model(there.record, name, {**native, **chosen})
    reference = reference_of(there, torch.float32)
    chains = [chain_of(backbone, reference, torch.float32) for backbone in (here, alone)]
    image, fields = chains[0].batch(2)
    assert relative_error(*(chain(image, fields) for chain in chains)) > least
    faults = compare_models(there.record, alone.record).different
    assert any(fault.startswith("base_sample_size") for fault in faults)


def test_what_is_learned_for_each_token_is_refused():
    there = load_backbone("uvit-tiny").record
    (fault,) = compare_models(
        there, load_backbone("uvit-tiny", {"image_size": 16}).record
    ).different
    assert fault == "image_size 8 there, 16 here (positions are learned, one per token)"
    there = load_backbone("hunyuan-tiny").record
    (fault,) = compare_models(
        there, load_backbone("hunyuan-tiny", {"text_len": 9}).record
    ).different
    assert fault.startswith("text_len 5 there, 9 here (")


def test_every_difference_is_told_and_says_what_it_does():
    there = load_backbone("sd-tiny").record
    options = {"sample_size": 32, "channels_last": True, "num_classes": 3, "layers_per_block": 1}
    compared = compare_models(there, load_backbone("sd-tiny", options).record)
    assert compared.different == ("layers_per_block 2 there, 1 here", "num_classes 0 there, 3 here")
    assert compared.changed == (
        "sample_size 16 there, 32 here: convolutions and attention take any size",
        "channels_last false there, true here: memory layout differs",
    )
    dit = load_backbone("dit-tiny").record
    here = continue_model(dit, "dit-tiny", {"sample_size": 16})
    (text,) = compare_models(dit, here.record).changed
    assert text == (
        "sample_size 8 there, 16 here: positions are computed at 16x16, with the spacing of 8"
    )
    assert compare_models(dit, there).different == ("family dit there, unet here",)


@pytest.mark.parametrize("name", ["dit-tiny", "pixart-tiny"])
def test_records_from_before_positions_had_a_base_mean_their_size(name):
    record = json.loads(json.dumps(load_backbone(name, {"sample_size": 16}).record))
    del record["options"]["base_sample_size"]
    rebuilt = load_backbone(record["name"], record["options"])
    assert published_form(rebuilt).config["sample_size"] == 16
    here = continue_model(record, name, {"sample_size": 24})
    assert here.record["options"]["base_sample_size"] == 16
    record["options"]["gone"] = 1
    assert compare_models(record, here.record).different == ("gone 1 there, no option here",)


@pytest.mark.parametrize(
    ("name", "option", "said"),
    [
        ("sd-tiny", "16x8,8x12", ["8 (4 levels); a sample of height 8"]),
        ("controlnet-tiny", "16,9x8", ["'16' is not HEIGHTxWIDTH, as in"]),
        (
            "sd3-tiny",
            "7x8,20x4",
            ["patch_size=2; a sample of height 7", "10 patches per side exceed pos_embed"],
        ),
        ("flux-tiny", "8x3", ["divisible by 2; a sample of height 8 and width 3"]),
        ("pixart-tiny", "8x8x8,0x4, 4x4,8x8", ["'8x8x8' is", "'0x4' is", "' 4x4' is"]),
        ("dit-tiny", "8x4,4x4,8x4,4x4", ["8x4 is repeated. Give it once", "4x4 is repeated"]),
        ("hunyuan-tiny", "8x99999999", ["'8x99999999' is not"]),
        ("uvit-tiny", "8x4", ["unsupported: positions are learned, one per token, for squares"]),
    ],
)
def test_faulty_buckets_are_refused(name, option, said):
    with pytest.raises(OptionError) as caught:
        load_backbone(name, {"buckets": option})
    assert len(caught.value.faults) == len(said)
    for fault, text in zip(caught.value.faults, said, strict=True):
        assert fault.startswith("buckets: ") and text in fault


@pytest.mark.parametrize("name", ["sdxl-tiny", "controlnet-tiny", "hunyuan-tiny", "flux-tiny"])
def test_buckets_are_a_choice_of_the_run(name):
    """Each shape is the chain of that size alone; the model and its published form stay."""
    sizes = ("16x16", "8x16", "24x8")
    square, several = load_backbone(name), load_backbone(name, {"buckets": ",".join(sizes)})
    compared = compare_models(square.record, several.record)
    assert compared.different == ()
    (text,) = compared.changed
    assert text == ("buckets empty there, 16x16,8x16,24x8 here: samples are of 16x16, 8x16, 24x8")
    assert published_form(several).config == published_form(square).config
    for shape_index, size in enumerate(sizes):
        alone, here = load_backbone(name, {"buckets": size}), at_shape(several, shape_index)
        assert here.batch_fields == alone.batch_fields
        assert here.image_tokens == alone.image_tokens
        for there, one in zip(here.layers, alone.layers, strict=True):
            assert replace(there, build=None) == replace(one, build=None)


def test_sequences_that_do_not_divide_name_their_size():
    chain = load_backbone("sd3-tiny", {"buckets": "8x8,6x10,6x6"})
    assert not chain.divides_sequences
    said = (
        r"9 tokens of \w+ in samples of 4x6x6 do not divide; 15 tokens of \w+ in samples of 4x6x10"
    )
    with pytest.raises(ValueError, match=f"2 ranks: {said}"):
        chain.divide_sequences(2)


def test_a_spacing_that_is_said_is_kept():
    dit = load_backbone("dit-tiny").record
    here = continue_model(dit, "dit-tiny", {"sample_size": 16, "base_sample_size": 16})
    assert compare_models(dit, here.record).different == ("base_sample_size 8 there, 16 here",)
