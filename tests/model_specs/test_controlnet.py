"""A locked UNet with a control branch: sizes, and numbers as diffusers computes them."""

import diffusers
import pytest
import torch

import model_specs
from megatron_pulse.backbone.costs import weighted_costs
from megatron_pulse.backbone.dataflow import required_gradients
from megatron_pulse.backbone.published_weights import adopted, require_fit, to_published
from megatron_pulse.planner.layout.placement import fold, sequential
from megatron_pulse.planner.program.make_plan import make_plan
from megatron_pulse.profile.parameters import count_parameters
from model_specs.controlnet.chain import BRANCH
from model_specs.controlnet.published_weights import joined
from tests.model_specs.chains import build_chain, perturb, relative_error
from tests.model_specs.parity import gradient_of

SMALL = {
    "sample_size": 8, "block_out_channels": "16,32", "transformer_depth": "1,0",
    "norm_num_groups": 4, "conditioning_widths": "4,8", "layers_per_block": 1,
}  # fmt: skip
VARIANTS = {
    "sd-v1.5": ("controlnet-tiny", SMALL),
    "sd-v2.1": ("controlnet-tiny", {**SMALL, "use_linear_projection": True, "num_heads": "1,2"}),
    "sdxl": (
        "controlnet-tiny",
        {
            **SMALL,
            "transformer_depth": "0,2",
            "mid_transformer_depth": 2,
            "pooled_dim": 24,
            "time_id_dim": 16,
        },
    ),
}


def twins(backbone, dtype):
    """diffusers' (UNet2DConditionModel, ControlNetModel) of the backbone's settings."""
    options = {
        key: value
        for key, value in backbone.record["options"].items()
        if not key.startswith("conditioning_")
    }
    form = model_specs.published_form(model_specs.load_backbone("sd-tiny", options))
    unet = diffusers.UNet2DConditionModel(**form.config)
    control = diffusers.ControlNetModel(**model_specs.published_form(backbone).config)
    return unet.to(dtype).requires_grad_(False), control.to(dtype)


def predict(unet, control, image, fields):
    """As diffusers' pipelines run both."""
    given = {"encoder_hidden_states": fields["context"]}
    if "pooled" in fields:
        given["added_cond_kwargs"] = {
            "text_embeds": fields["pooled"],
            "time_ids": fields["time_ids"],
        }
    down, mid = control(
        image, fields["timesteps"], controlnet_cond=fields["conditioning"], return_dict=False,
        **given,
    )  # fmt: skip
    return unet(
        image, fields["timesteps"], down_block_additional_residuals=down,
        mid_block_additional_residual=mid, **given,
    ).sample  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_same_numbers_as_diffusers(variant, dtype, one_rank):
    """Prediction and every gradient of the branch, at every size; the UNet has none. Weights go out
    and come back bit for bit, under the names of both classes."""
    name, options = VARIANTS[variant]
    backbone = model_specs.load_backbone(name, {**options, "buckets": "8x8,4x8,12x4"})
    chain = build_chain(backbone, dtype)
    perturb(chain.parameters().values())
    unet, control = twins(backbone, dtype)
    form = model_specs.published_form(backbone)
    weights = to_published(form, chain.state())
    parts = [
        {n.removeprefix(BRANCH): t for n, t in weights.items() if n.startswith(BRANCH) is branch}
        for branch in (False, True)
    ]
    unet.load_state_dict(parts[0])
    control.load_state_dict(parts[1])
    require_fit(form, chain.state(), weights, "both")
    back = dict(adopted(form, chain.state(), weights, "both"))
    assert all(torch.equal(back[name], tensor) for name, tensor in chain.state().items())
    settings = joined(
        {**unet.config, "_class_name": "UNet2DConditionModel"},
        {**control.config, "_class_name": "ControlNetModel"},
    )
    again = model_specs.load_published(settings)
    left = {"context_length": None, "buckets": None}
    assert again.record["options"] | left == backbone.record["options"] | left

    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    for shape in range(3):
        assert_same_at(shape, chain, unet, control, form, tolerance)


def assert_same_at(shape, chain, unet, control, form, tolerance):
    for parameter in (*chain.parameters().values(), *control.parameters()):
        parameter.grad = None
    image, fields = chain.batch(2, shape=shape)
    ours, theirs = chain(image, fields), predict(unet, control, image, fields)
    assert relative_error(ours, theirs) < tolerance / 10
    zeros = {name: torch.zeros_like(p) for name, p in control.named_parameters()}
    without = predict(
        unet, lambda *a, **k: torch.func.functional_call(control, zeros, a, k), image, fields
    )
    assert relative_error(without, theirs) > 1e-3
    factors = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2)).to(image.dtype)
    (ours * factors).sum().backward()
    (theirs * factors).sum().backward()
    trained = {n: gradient_of(p) for n, p in chain.parameters().items() if p.requires_grad}
    frozen = [p for p in chain.parameters().values() if not p.requires_grad]
    assert all(p.grad is None for p in frozen) and frozen
    converted = to_published(form, trained)
    expected = {f"{BRANCH}{n}": gradient_of(p) for n, p in control.named_parameters()}
    assert converted.keys() == expected.keys()
    negligible = 1e-3 * max(g.abs().max().item() for g in expected.values())
    for name, gradient in converted.items():
        scale = max(expected[name].abs().max().item(), negligible)
        assert (gradient - expected[name]).abs().max().item() < tolerance * scale, name


@pytest.mark.parametrize(
    ("name", "trained", "locked"),
    [("controlnet-sd-v1.5", 361_279_120, 859_520_964)],
)
def test_sizes_of_the_published(name, trained, locked):
    """lllyasviel's sd-controlnet models have 361,279,120 parameters beside SD 1.5's."""
    backbone = model_specs.load_backbone(name)
    costs = weighted_costs(backbone, [1.0] * len(backbone.layers))
    for placement in (fold(4), sequential(4)):
        plan = make_plan(backbone, costs, placement)
        assert plan.step(8).schedule.order  # compiled and proven
        ends = {(r.source_stage, r.destination_stage) for r in plan.routes.skips}
        local = all(source + destination == 7 for source, destination in ends)
        assert local is (placement.num_stages == 8)
    assert sum(count_parameters(backbone)) == trained + locked
    assert backbone.batch_fields["conditioning"].shape == (3, 512, 512)


def test_no_gradient_is_computed_for_the_locked_encoder():
    backbone = model_specs.load_backbone("controlnet-tiny", SMALL)
    wanted = required_gradients(backbone)
    for layer, runs, entering in zip(
        backbone.layers, wanted.layers, wanted.boundaries, strict=True
    ):
        locked = not layer.name.startswith((BRANCH, "up_blocks", "conv_out"))
        assert runs is not locked, layer.name
        for out, into in layer.beside.items():
            assert layer.outputs[out] == layer.inputs[into]
        if locked and layer.beside:
            own = [i for i in range(len(layer.inputs)) if i not in layer.beside.values()]
            assert not any(entering[i] for i in own), layer.name
            if layer.name != "conv_in":
                assert any(entering)
    assert {n.startswith(BRANCH): wants for n, wants in wanted.skips.items()} == {
        True: True,
        False: False,
    }
