"""Encoders cut into layers: the bits of the whole, and of how many samples at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import AutoencoderKL

from megatron_pulse.encoders.autoencoder import Autoencoder, posterior_noise
from megatron_pulse.encoders.encoder_piece import EncoderPiece, run_pieces
from megatron_pulse.encoders.image_pieces import MOMENTS, PIXELS, image_pieces
from megatron_pulse.encoders.text_encoders import TextEncoders
from megatron_pulse.encoders.text_pieces import text_pieces
from megatron_pulse.encoders.text_recipe import ComponentKind, State
from megatron_pulse.errors import UserError
from megatron_pulse.runtime.encoding.packing import PackedLayout
from model_specs.common.text_recipes import SD
from tests.cli.test_large_prompts import DC
from tests.encoders.pipelines import LENGTH, make_encoder, make_pipeline
from tests.ranks import run_ranks

KINDS = {
    "clip": ComponentKind.CLIP,
    "projected": ComponentKind.PROJECTED_CLIP,
    "t5": ComponentKind.T5,
    "bert": ComponentKind.BERT,
    "umt5": ComponentKind.UMT5,
    "llama": ComponentKind.LLAMA,
    "gemma2": ComponentKind.GEMMA2,
    "gemma3": ComponentKind.GEMMA3,
    "qwen3": ComponentKind.QWEN3,
    "qwen_vl": ComponentKind.QWEN_VL,
    "mistral": ComponentKind.MISTRAL,
}


def trunk_of(kind: str) -> Any:
    """The layers of a tiny encoder that read text."""
    model = make_encoder(kind)
    return model.get_decoder() if KINDS[kind].is_decoder else model


IDS = torch.tensor([[2, 5, 6, 7, 1, 1], [2, 8, 1, 1, 1, 1], [2, 9, 10, 11, 12, 1]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])


def weights(pieces: tuple[EncoderPiece, ...]) -> list[int]:
    return [id(p) for piece in pieces for p in piece.parameters()]


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_text(kind: str, masked: bool) -> None:
    torch.manual_seed(0)
    model = trunk_of(kind)
    asked = {"last": -1, "penultimate": -2, "hidden_1": 1, "hidden_-3": -3}
    if not KINDS[kind].is_decoder:
        asked = {} if kind in ("t5", "bert", "umt5") else {"penultimate": -2}
    pooled = {"pooled"} if kind in ("clip", "projected") else set()
    pieces = text_pieces(KINDS[kind], model, frozenset({"last", *asked, *pooled}), masked)
    assert [piece.name for piece in pieces][1:-1] and len(pieces) == 5
    held = weights(pieces)
    trained = {id(p) for n, p in model.named_parameters() if not n.startswith("pooler")}
    assert len(held) == len(set(held)) and set(held) == trained
    ours = run_pieces(pieces, {"ids": IDS, "mask": MASK})
    whole: Any = model(
        IDS, attention_mask=MASK if masked else torch.ones_like(MASK), output_hidden_states=True
    )
    assert torch.equal(ours["last"], whole.last_hidden_state)
    for name, index in asked.items():
        assert torch.equal(ours[name], whole.hidden_states[index]), name
    if pooled:
        vector = whole.text_embeds if kind == "projected" else whole.pooler_output
        assert torch.equal(ours["pooled"], vector)


def test_layers_that_nothing_needs_are_left_out() -> None:
    pieces = text_pieces(
        ComponentKind.CLIP, make_encoder("clip"), frozenset({State.PENULTIMATE}), False
    )
    assert [piece.name for piece in pieces] == ["embeddings", "layers.0", "layers.1"]
    pieces = text_pieces(
        ComponentKind.LLAMA, make_encoder("llama"), frozenset({"hidden_1", "hidden_-3"}), True
    )
    assert [piece.name for piece in pieces] == ["embeddings", "layers.0"]


def test_states_beyond_the_layers_are_refused() -> None:
    with pytest.raises(UserError, match="it has 3 layers, but the states after 10 are needed"):
        text_pieces(ComponentKind.LLAMA, make_encoder("llama"), frozenset({"hidden_10"}), True)


def make_autoencoder(**settings: Any) -> Any:
    torch.manual_seed(0)
    small: dict[str, Any] = {
        "norm_num_groups": 4, "block_out_channels": (8, 12), "layers_per_block": 2,
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }  # fmt: skip
    return AutoencoderKL(**{**small, **settings}).eval()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"latent_channels": 16, "shift_factor": 0.06, "use_quant_conv": False},
        {"down_block_types": ("AttnDownEncoderBlock2D", "DownEncoderBlock2D")},
        {"mid_block_add_attention": False},
    ],
    ids=["sd", "flux", "attention", "plain"],
)
@torch.no_grad()
def test_images(settings: dict[str, Any], tmp_path: Path) -> None:
    model = make_autoencoder(**settings)
    pieces = image_pieces(model)
    images = torch.randn(2, 3, 16, 16)
    posterior = model.encode(images).latent_dist
    ours = run_pieces(pieces, {PIXELS: images})[MOMENTS]
    assert torch.equal(ours, posterior.parameters)
    held = weights(pieces)
    parts = [model.encoder, *([model.quant_conv] if model.quant_conv is not None else [])]
    assert len(held) == len(set(held))
    assert set(held) == {id(p) for part in parts for p in part.parameters()}

    model.save_pretrained(tmp_path)
    opened = Autoencoder(tmp_path)
    shape = tuple(posterior.mean.shape[1:])
    noise = torch.stack([posterior_noise(1, i, 3, shape) for i in range(2)])
    wanted = posterior.mean + posterior.std * noise
    scaled = (wanted - (model.config.shift_factor or 0)) * model.config.scaling_factor
    torch.testing.assert_close(opened.encode(images, noise), scaled, rtol=0, atol=1e-6)


def make_flux2() -> Any:
    torch.manual_seed(0)
    model = diffusers.AutoencoderKLFlux2(
        norm_num_groups=4, block_out_channels=(8, 12), layers_per_block=1, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        sample_size=16,
    )  # fmt: skip
    model.bn.running_mean.normal_()
    model.bn.running_var.uniform_(0.5, 2)
    return model.eval()


@torch.no_grad()
def test_flux2_latents_are_those_of_its_pipeline(tmp_path: Path) -> None:
    model = make_flux2()
    model.save_pretrained(tmp_path)
    parts = dict.fromkeys(("scheduler", "text_encoder", "tokenizer", "transformer"))
    pipeline = diffusers.Flux2Pipeline(vae=model, **parts)
    images, ours = torch.rand(2, 3, 16, 24) * 2 - 1, Autoencoder(tmp_path)
    theirs = torch.cat([pipeline._encode_vae_image(each, None) for each in images.split(1)])
    mean = ours.encode(images)
    torch.testing.assert_close(mean, theirs, rtol=0, atol=1e-6)
    assert mean.shape[1:] == ours.latent_shape((3, 16, 24)) == (16, 4, 6)
    std = (model.bn.running_var + model.config.batch_norm_eps).sqrt().view(1, -1, 1, 1)
    inner = pipeline._unpatchify_latents(mean * std + model.bn.running_mean.view(1, -1, 1, 1))
    pixels = model.decode(inner).sample.clamp(-1, 1)
    torch.testing.assert_close(ours.decode(mean), pixels, rtol=0, atol=1e-5)


@torch.no_grad()
def test_sana_latents_are_those_of_its_pipeline(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = diffusers.AutoencoderDC(**DC).eval()
    model.save_pretrained(tmp_path)
    ours, pictures = Autoencoder(tmp_path), torch.rand(2, 3, 16, 24) * 2 - 1
    mean, deviation = ours.posterior(pictures)
    latents = torch.cat([model.encode(each).latent for each in pictures.split(1)])
    decoded = model.decode(latents).sample.clamp(-1, 1)
    torch.testing.assert_close(mean, latents * 0.41407, rtol=1e-6, atol=0)
    assert not deviation.any() and mean.shape[1:] == ours.latent_shape((3, 16, 24)) == (4, 4, 6)
    torch.testing.assert_close(ours.decode(mean), decoded, rtol=0, atol=1e-5)


@torch.no_grad()
def test_qwen_image_latents_are_those_of_its_pipeline(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = diffusers.AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.5, 2.0, 1.0, 0.5],
    ).eval()  # fmt: skip
    model.save_pretrained(tmp_path)
    names = ("scheduler", "text_encoder", "tokenizer", "processor", "transformer")
    pipeline = diffusers.QwenImageEditPipeline(vae=model, **dict.fromkeys(names))
    images, ours = torch.rand(2, 3, 16, 24) * 2 - 1, Autoencoder(tmp_path)
    frames = images.unsqueeze(2).split(1)
    theirs = torch.cat([pipeline._encode_vae_image(each, None) for each in frames])
    mean = ours.encode(images)
    torch.testing.assert_close(mean, theirs.squeeze(2), rtol=0, atol=1e-6)
    std, shift = (
        torch.tensor(s).view(1, -1, 1, 1) for s in ([1.5, 2, 1, 0.5], [0.1, -0.2, 0.3, 0])
    )
    pixels = model.decode((mean * std + shift).unsqueeze(2)).sample.squeeze(2).clamp(-1, 1)
    torch.testing.assert_close(ours.decode(mean), pixels, rtol=0, atol=1e-5)


@torch.no_grad()
def test_pictures_are_encoded_and_decoded_in_diffusers_tiles(tmp_path: Path) -> None:
    model = make_autoencoder(sample_size=16)
    model.save_pretrained(tmp_path)
    model.enable_tiling()
    images, ours = torch.rand(2, 3, 40, 24) * 2 - 1, Autoencoder(tmp_path, tiled=True)
    theirs = torch.cat([model.encode(each).latent_dist.mean for each in images.split(1)])
    assert torch.equal(ours.encode(images), theirs * model.config.scaling_factor)
    drawn = ours.decode(theirs * model.config.scaling_factor)
    pixels = model.decode(theirs).sample.clamp(-1, 1)
    torch.testing.assert_close(drawn, pixels, rtol=0, atol=1e-5)
    whole = Autoencoder(tmp_path).decode(theirs * model.config.scaling_factor)
    assert not torch.allclose(whole, drawn, rtol=0, atol=1e-3)


def test_posterior_noise_is_a_function_of_seed_sample_and_pass() -> None:
    shape = (2, 3, 3)
    first = posterior_noise(1, 5, 0, shape)
    assert torch.equal(first, posterior_noise(1, 5, 0, shape))
    for other in ((2, 5, 0), (1, 6, 0), (1, 5, 1)):
        assert not torch.equal(first, posterior_noise(*other, shape))


@torch.no_grad()
def test_one_image_at_a_time_gives_the_same_bits_in_any_company(tmp_path: Path) -> None:
    """Encoded together their bits may differ, by matrix sizes and libraries."""
    make_autoencoder().save_pretrained(tmp_path)
    images = torch.randn(3, 3, 16, 16)
    for dtype in (torch.float32, torch.bfloat16):
        ours = Autoencoder(tmp_path, dtype)
        together = ours.encode(images)
        for i in range(3):
            assert torch.equal(ours.encode(images[i : i + 1])[0], together[i])


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_leaves_the_same_states(kind: str) -> None:
    """Texts that fill their tokens need no mask, others do: what travels is of one layout."""
    pieces = text_pieces(KINDS[kind], trunk_of(kind), frozenset({State.LAST}), True)
    states = [{"ids": IDS[i : i + 1], "mask": MASK[i : i + 1]} for i in (0, 2)]
    whole = [run_pieces(pieces, given)["last"] for given in states]
    for piece in pieces:
        states = [run_pieces((piece,), given) for given in states]
        assert len({PackedLayout.of(each) for each in states}) == 1
        sent = [{n: v for n, v in each.items() if not n.startswith("_")} for each in states]
        states = sent  # as on another device
    assert all(torch.equal(s["last"], w) for s, w in zip(states, whole, strict=True))


def loads_and_makes(folder: Path) -> str:
    """The device that a meta context gives ``linspace`` in a process that loaded a text encoder."""
    known = torch.utils._device._device_constructors
    for name, make in list(vars(torch).items()):  # as where nothing stands in for CUDA
        if callable(make) and getattr(make, "__wrapped__", None) in known():
            setattr(torch, name, make.__wrapped__)
    known.cache_clear()  # as where no context was used before
    TextEncoders(folder, SD, {"context": (LENGTH, 8)})
    with torch.device("meta"):
        return str(torch.linspace(0, 1, 3).device)


def test_device_contexts_stay_what_they_are(tmp_path: Path) -> None:
    assert run_ranks(1, loads_and_makes, make_pipeline(tmp_path, "clip")) == ["meta"]
