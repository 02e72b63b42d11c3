"""Declared classes beside diffusers' own, called as their pipelines call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_pulse.integration.checkpoint.published_weights import export_weights, whole_stage
from megatron_pulse.profile.measurement.module_check import module_faults
from model_specs import load_backbone
from model_specs.derived.rank0_messages import say_once
from tests.tracing.subject import Subject
from tests.tracing.zoo import make
from tests.tracing.zoo.declared import TINY, class_of, declaration

type Call = Callable[[Any, dict[str, Any]], Tensor]


def _plain(module: Any, given: dict[str, Any]) -> Tensor:
    """The class called with what is declared."""
    return module(**given, return_dict=False)[0]


def _pack(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    x = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(b, h * w // 4, 4 * c)


def _unpack(x: Tensor, like: Tensor) -> Tensor:
    b, _, h, w = like.shape
    x = x.view(b, h // 2, w // 2, -1, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return x.reshape(b, -1, h, w)


def _packed(module: Any, given: dict[str, Any]) -> Tensor:
    """Flux's tokens, whose positions are the pipeline's."""
    latents = given.pop("hidden_states")
    return _unpack(_plain(module, {**given, "hidden_states": _pack(latents)}), latents)


def _chroma(module: Any, given: dict[str, Any]) -> Tensor:
    mask = given["attention_mask"]
    kept = torch.arange(mask.shape[1])[None] <= mask.sum(1)[:, None]
    given["attention_mask"] = torch.cat([kept.float(), torch.ones(len(mask), 16)], 1)
    return _packed(module, given)


def _hidream(module: Any, given: dict[str, Any]) -> Tensor:
    """In training the class returns patches: [b, channels, tokens, pixels of a patch]."""
    given["encoder_hidden_states_llama3"] = given["encoder_hidden_states_llama3"].transpose(0, 1)
    patches = _plain(module, given).unflatten(3, (2, 2)).unflatten(2, (4, 4))
    return -torch.einsum("bchwpq->bchpwq", patches).flatten(4).flatten(2, 3)


def _lumina2(module: Any, given: dict[str, Any]) -> Tensor:
    return -_plain(module, {**given, "timestep": 1 - given["timestep"]})


def _z_image(module: Any, given: dict[str, Any]) -> Tensor:
    pairs = zip(given["cap_feats"], given["cap_mask"].bool(), strict=True)
    captions = [text[mask] for text, mask in pairs]
    images = list(given["x"].unsqueeze(2).unbind())
    (found,) = module(images, 1 - given["t"], captions, return_dict=False)
    return -torch.stack(found).squeeze(2)


def _omnigen(module: Any, given: dict[str, Any]) -> Tensor:
    """One sample at a time: the class gives all samples the positions of the first."""
    from diffusers.pipelines.omnigen.processor_omnigen import OmniGenCollator

    collator, found = OmniGenCollator(), []
    for i, mask in enumerate(given["attention_mask"]):
        tokens = [16]
        found.append(
            module(
                hidden_states=given["hidden_states"][i : i + 1],
                timestep=1 - given["timestep"][i : i + 1],
                input_ids=given["input_ids"][i : i + 1],
                input_img_latents=[],
                input_image_sizes={},
                attention_mask=collator.create_mask(mask[None], tokens)[0],
                position_ids=collator.create_position(mask[None], tokens),
                return_dict=False,
            )[0]
        )
    return -torch.cat(found)


def _ernie(module: Any, given: dict[str, Any]) -> Tensor:
    lengths = given.pop("text_mask").sum(1)
    return _plain(module, {**given, "text_lens": lengths})


def _appended(*names: str) -> Call:
    def call(module: Any, given: dict[str, Any]) -> Tensor:
        parts = [given["hidden_states"], *(given.pop(name) for name in names)]
        return _plain(module, {**given, "hidden_states": torch.cat(parts, 1)})

    return call


def _without_gradient_of_first(found: Tensor) -> Tensor:
    return torch.cat([found[:, :, :1].detach(), found[:, :, 1:]], 2)


def _wan_5b(module: Any, given: dict[str, Any]) -> Tensor:
    """A time for every token: 0 for those of the first frame."""
    latents, image = given["hidden_states"].clone(), given.pop("image_latent")
    latents[:, :, 0] = image[:, :, 0]
    times = given["timestep"][:, None].repeat(1, 3 * 16)
    times[:, :16] = 0
    found = _plain(module, {**given, "hidden_states": latents, "timestep": times})
    return _without_gradient_of_first(found)


def _i2vgen(module: Any, given: dict[str, Any]) -> Tensor:
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return _plain(module, {"image_latents": given.pop("image_latent"), **given})


def _scaled(factor: float, call: Call = _plain) -> Call:
    """The class called with scaled guidance."""
    return lambda module, given: call(module, {**given, "guidance": factor * given["guidance"]})


def _framepack(module: Any, given: dict[str, Any]) -> Tensor:
    prefix, fourth, half, one, own = torch.arange(1 + 16 + 2 + 1 + 3).split([1, 16, 2, 1, 3])
    indices = {
        "indices_latents": own,
        "indices_latents_clean": torch.cat([prefix, one]),
        "indices_latents_history_2x": half,
        "indices_latents_history_4x": fourth,
    }
    return _plain(module, {**given, **indices})


def _kandinsky5(module: Any, given: dict[str, Any]) -> Tensor:
    image = given.pop("image_latent")
    noisy = torch.cat([image[:, :, :1], given.pop("hidden_states")[:, :, 1:]], 2)
    mask = torch.zeros_like(noisy[:, :1])
    mask[:, :, 0] = 1
    parts = [noisy, image * mask, mask]
    found = module(
        hidden_states=torch.cat(parts, 1).permute(0, 2, 3, 4, 1),
        visual_rope_pos=[torch.arange(3), torch.arange(4), torch.arange(4)],
        text_rope_pos=torch.arange(6),
        scale_factor=(1, 3.16, 3.16),
        return_dict=False,
        **given,
    )
    return _without_gradient_of_first(found.permute(0, 4, 1, 2, 3))


def _ltx(module: Any, given: dict[str, Any]) -> Tensor:
    """A time for every token: 0 for those of the first frame."""
    latents, image = given.pop("hidden_states"), given.pop("image_latent")
    given["hidden_states"] = torch.cat([image[:, :, :1], latents[:, :, 1:]], 2).flatten(2).mT
    places = latents[0, 0].numel()
    given["timestep"] = given["timestep"][:, None].repeat(1, places)
    given["timestep"][:, : latents[0, 0, 0].numel()] = 0
    return _without_gradient_of_first(_plain(module, given).mT.view(latents.shape))


def _ltx2(module: Any, given: dict[str, Any]) -> Tensor:
    """With any sound: video does not depend on it."""
    latents = given.pop("hidden_states")
    found = module(
        hidden_states=latents.flatten(2).transpose(1, 2),
        audio_hidden_states=torch.randn(len(latents), 4, 8),
        audio_encoder_hidden_states=torch.randn(len(latents), 6, 16),
        num_frames=3, height=2, width=2, audio_num_frames=4,
        isolate_modalities=True, return_dict=False, **given,
    )[0]  # fmt: skip
    return found.transpose(1, 2).view(latents.shape)


def _easy_animate(module: Any, given: dict[str, Any]) -> Tensor:
    inpaint = torch.cat([given.pop("known_mask"), given.pop("known_video")], 1)
    return _plain(module, {**given, "inpaint_latents": inpaint})


def _cogview4(module: Any, given: dict[str, Any]) -> Tensor:
    """Its pipeline's shift at 16 tokens is 0.4375: the time of the noise is given."""
    share = given["timestep"] / 1000
    given["timestep"] = 1000 * share / (share + 0.4375 * (1 - share))
    return _plain(module, given)


def _cosmos(module: Any, given: dict[str, Any]) -> Tensor:
    """With a stand-in for torchvision, whose resizing to the same size returns the picture."""
    from types import SimpleNamespace
    from unittest.mock import patch

    from diffusers.models.transformers import transformer_cosmos

    transforms = SimpleNamespace(
        functional=SimpleNamespace(resize=lambda mask, size, interpolation: mask),
        InterpolationMode=SimpleNamespace(NEAREST=None),
    )
    with patch.object(transformer_cosmos, "transforms", transforms, create=True):
        return _plain(module, {**given, "padding_mask": torch.zeros(1, 1, 8, 8)})


CALLS: Mapping[str, Call] = {
    "chroma": _chroma,
    **dict.fromkeys(("ovis", "longcat", "bria", "krea2"), _packed),
    "hidream": _hidream,
    "lumina2": _lumina2,
    "z_image": _z_image,
    "omnigen": _omnigen,
    "ernie": _ernie,
    "wan_5b": _wan_5b,
    "chrono_edit": _appended("known_mask", "known_video"),
    "hunyuan_video15": _appended("image_latent", "known_mask"),
    "motif": _appended("image_latent", "known_mask"),
    "framepack": _scaled(1000, _framepack),
    "hunyuan_image": _scaled(1000),
    "sana_video": _scaled(0.1),
    "i2vgen": _i2vgen,
    "kandinsky5": _kandinsky5,
    "ltx_known": _ltx,
    "ltx2": _ltx2,
    "easy_animate": _easy_animate,
    "cosmos": _cosmos,
    "cogview4": _cogview4,
}


def _prediction(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def _with_gradients(
    module: nn.Module, call: Callable[[], Tensor], seed: int = 7
) -> tuple[Tensor, dict[str, Tensor]]:
    """Prediction, and gradients of all parameters that have one."""
    predicted = call()
    torch.manual_seed(seed)
    names, parameters = zip(*module.named_parameters(), strict=True)
    gradients = torch.autograd.grad(
        predicted, parameters, torch.randn_like(predicted), allow_unused=True
    )
    found = zip(names, gradients, strict=True)
    return predicted, {name: grad for name, grad in found if grad is not None and grad.any()}


@pytest.mark.parametrize("name", TINY)
def test_declared_class_equals_its_own_call(name: str) -> None:
    """Outputs and gradients to 1e-6 of the largest, captions of two lengths."""
    module, given = make(name)
    own = class_of(name)(**TINY[name].config).train()
    own.load_state_dict(module.state_dict())
    inputs = given(2)
    call = CALLS.get(name, _plain)
    output, gradients = _with_gradients(module, lambda: _prediction(module(**inputs)))
    wanted, expected = _with_gradients(own, lambda: call(own, dict(inputs)))
    assert float((output - wanted).abs().max()) < 1e-6 * float(wanted.abs().max()) * 2
    top = max(float(grad.abs().max()) for grad in expected.values())
    rounding = {n for n, grad in expected.items() if float(grad.abs().max()) < 1e-6 * top}
    assert gradients.keys() - rounding >= expected.keys() - rounding
    for parameter, grad in expected.items():
        got = gradients.get(parameter, torch.zeros_like(grad))
        bound = 3e-6 * max(float(grad.abs().max()), 1e-3 * top)
        assert float((got - grad).abs().max()) < bound, parameter


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("WanTransformer3DModel", {"frames": 3, "known_frames": 3}, "less than frames = 3"),
        (
            "WanTransformer3DModel",
            {"frames": 4, "known_frames": 1, "patch_size": "2,2,2"},
            "give a multiple of 2",
        ),
        ("CosmosTransformer3DModel", {}, "'learnable' is Cosmos 1, whose pipelines"),
        ("Kandinsky5Transformer3DModel", {"known_frames": 1}, "visual_cond is false"),
        ("AuraFlowTransformer2DModel", {"height": 66, "width": 68}, "height = 66: pos_embed_max_"),
        ("HunyuanVideoFramepackTransformer3DModel", {}, "has_image_proj and has_clean_x_embedder"),
        (
            "ZImageTransformer2DModel",
            {"all_patch_size": "2,4", "all_f_patch_size": "1,1"},
            "several patch sizes",
        ),
    ],
)
def test_declared_class_refuses_settings(kind: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_backbone(f"diffusers:{kind}", options)


def test_declared_class_refuses_sizes_that_its_patches_cut() -> None:
    tiny = TINY["hunyuan_video15"]
    said = r"predicts \[4, 2, 8, 8\] for samples of \[4, 3, 8, 8\]"
    cut = {"patch_size_t": 2, "frames": 3}  # patches of frames are no part of patch_size
    with pytest.raises(ValueError, match=said):
        load_backbone(f"diffusers:{tiny.kind}", {**tiny.config, **tiny.sizes, **cut})


def test_omnigen_takes_the_long_rotary_factors_for_long_sequences() -> None:
    """17 tokens beside 6 of text; the second caption has 4."""
    module, given = make("omnigen")
    own = class_of("omnigen")(**TINY["omnigen"].config)
    own.load_state_dict(module.state_dict())
    inputs, found = given(2), []
    for most in (23, 16):
        module.rope.original_max_position_embeddings = most
        own.rope.original_max_position_embeddings = most
        found.append(_prediction(module(**inputs)))
        torch.testing.assert_close(found[-1], _omnigen(own, dict(inputs)), rtol=0, atol=2e-6)
    assert not torch.allclose(*found, atol=1e-3)
    for most in (17, 22):
        module.rope.original_max_position_embeddings = most
        with pytest.raises(ValueError, match=f"text_length of at most {most - 17}"):
            module(**inputs)


def test_kandinsky5_runs_in_bf16() -> None:
    """Its embedding of times, too, which the class gives fp32."""
    module, given = make("kandinsky5")
    inputs = given(2)
    wanted = _prediction(module(**inputs))
    half = {name: value.bfloat16() for name, value in inputs.items()}
    found = _prediction(module.bfloat16()(**half))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=0.03 * float(wanted.abs().max()))


def test_positions_are_those_of_pipelines() -> None:
    from diffusers.pipelines.longcat_image.pipeline_longcat_image import prepare_pos_ids

    inputs = declaration("longcat").make("float32")(1)
    image = prepare_pos_ids(1, "image", start=(512, 512), height=4, width=4)
    assert torch.equal(inputs["img_ids"], image)
    assert torch.equal(inputs["txt_ids"], prepare_pos_ids(num_token=6))


@pytest.mark.parametrize("name", [*TINY, "mochi"])
def test_layers_of_declared_classes_run_without_values(name: str) -> None:
    """As analytic profiles call them; on another device than they were exported on."""
    assert not module_faults(Subject(name, "float32").chain)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["hunyuan_video15", "ltx2"])
def test_weights_go_in_and_out_of_a_folder(name: str, tmp_path: Path) -> None:
    """Also those that no prediction depends on."""
    tiny = TINY[name]
    torch.manual_seed(0)
    module = class_of(name)(**tiny.config)
    module.save_pretrained(tmp_path / "in")
    backbone = load_backbone(f"diffusers:{tmp_path / 'in'}", dict(tiny.sizes))
    stage = whole_stage(backbone, initialise=True)
    published, tensors = export_weights(backbone, stage)
    wanted = module.state_dict()
    assert published.class_name == tiny.kind and tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def test_a_fixed_dropout_is_turned_off_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    say_once.cache_clear()
    module, _ = make("i2vgen")
    assert not any(part.p for part in module.modules() if isinstance(part, nn.Dropout))
    assert "I2VGenXLUNet: its dropout of 0.1 is off" in capsys.readouterr().err
