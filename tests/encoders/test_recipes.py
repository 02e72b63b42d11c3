"""Our text states are those of diffusers' pipelines' ``encode_prompt``, bit for bit."""

from __future__ import annotations

import inspect
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers.pipelines.kolors.text_encoder import ChatGLMModel
from diffusers.pipelines.kolors.tokenizer import ChatGLMTokenizer
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from safetensors.torch import load_file, save_file

from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import Objective
from megatron_pulse.encoders.autoencoder import Autoencoder, AutoencoderError
from megatron_pulse.encoders.components import components as parts_of
from megatron_pulse.encoders.text_encoders import TextEncoders
from megatron_pulse.encoders.text_recipe import Part, State, TextRecipe, folder_name
from megatron_pulse.encoders.tokens import EncodersError, Tokenizers
from megatron_pulse.errors import UserError
from megatron_pulse.integration.loop_encoders import DeviceEncoders, LoopEncoders
from megatron_pulse.runtime.encoding.encoding import Encoding
from model_specs import load_backbone, load_published, text_recipe
from model_specs.common import text_recipes
from tests.encoders.pipelines import LENGTH, WORDS, make_connectors, make_pipeline

TEXT = "a Red bird with the very old blue heart of a cat"
SHORT = " a Red bird"


def components(folder: Path, count: int) -> dict[str, Any]:
    """Components of diffusers' pipelines."""
    found = {}
    for place in range(1, count + 1):
        where = folder / folder_name("text_encoder", place)
        tokens = folder / folder_name("tokenizer", place)
        (kind,) = json.loads((where / "config.json").read_text())["architectures"]
        of_model: Any = getattr(transformers, kind, None)
        of_tokens: Any = transformers.AutoTokenizer
        if kind == "ChatGLMModel":
            of_model, of_tokens = ChatGLMModel, ChatGLMTokenizer
        found[folder_name("text_encoder", place)] = of_model.from_pretrained(where).eval()
        found[folder_name("tokenizer", place)] = of_tokens.from_pretrained(tokens)
    return found


def sd(folder: Path, text: str) -> tuple[Any, Any]:
    pipeline = diffusers.StableDiffusionPipeline(
        vae=None, unet=None, scheduler=None, safety_checker=None, feature_extractor=None,
        requires_safety_checker=False, **components(folder, 1),
    )  # fmt: skip
    states, null = pipeline.encode_prompt(text, "cpu", 1, True)
    return {"context": states}, {"context": null}


def sdxl(folder: Path, text: str) -> tuple[Any, Any]:
    pipeline = diffusers.StableDiffusionXLPipeline(
        vae=None, unet=None, scheduler=None, **components(folder, 2)
    )
    states, null, pooled, null_pooled = pipeline.encode_prompt(text, device="cpu")
    return {"context": states, "pooled": pooled}, {"context": null, "pooled": null_pooled}


def kolors(folder: Path, text: str) -> tuple[Any, Any]:
    pipeline = diffusers.KolorsPipeline(
        vae=None, unet=None, scheduler=None, **components(folder, 1)
    )
    states, null, pooled, null_pooled = pipeline.encode_prompt(
        text, device="cpu", max_sequence_length=60
    )
    return {"context": states, "pooled": pooled}, {"context": null, "pooled": null_pooled}


def suv(folder: Path, text: str) -> tuple[Any, Any]:
    """States as in Open-Sora Plan's code, which no pipeline of diffusers has."""
    parts, found = components(folder, 2), []
    for each in (text.lower(), ""):
        settings: Any = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        long = parts["tokenizer"](each, max_length=7, **settings)
        short = parts["tokenizer_2"](each, max_length=LENGTH, **settings)
        states = parts["text_encoder"](long.input_ids, attention_mask=long.attention_mask)[0]
        pooled = parts["text_encoder_2"](short.input_ids).text_embeds
        found.append({"context": states, "context_mask": long.attention_mask, "pooled": pooled})
    return found[0], found[1]


def ltx2(folder: Path, text: str) -> tuple[Any, Any]:
    """The pipeline's call hands the states to its connectors."""
    connectors = LTX2TextConnectors.from_pretrained(folder / "connectors").eval()
    empty = dict.fromkeys(("vae", "audio_vae", "transformer", "vocoder", "scheduler"))
    parts = components(folder, 1)
    parts["tokenizer"].padding_side = "right"  # the pipeline turns it
    pipeline = diffusers.LTX2Pipeline(connectors=connectors, **empty, **parts)
    states, mask, null, null_mask = pipeline.encode_prompt(
        text, device="cpu", max_sequence_length=15
    )
    found = []
    for given, of in ((states, mask), (null, null_mask)):
        made, _, seen = connectors(given, of, padding_side=pipeline.tokenizer.padding_side)
        found.append({"context": made, "context_mask": seen})
    return found[0], found[1]


def sd3(folder: Path, text: str) -> tuple[Any, Any]:
    pipeline = diffusers.StableDiffusion3Pipeline(
        vae=None, transformer=None, scheduler=None, **components(folder, 3)
    )
    states, null, pooled, null_pooled = pipeline.encode_prompt(
        text, text, text, device="cpu", max_sequence_length=7
    )
    return {"context": states, "pooled": pooled}, {"context": null, "pooled": null_pooled}


def flux(folder: Path, text: str) -> tuple[Any, Any]:
    pipeline = diffusers.FluxPipeline(
        vae=None, transformer=None, scheduler=None, **components(folder, 2)
    )
    found = []
    for each in (text, ""):
        states, pooled, _ = pipeline.encode_prompt(each, device="cpu", max_sequence_length=7)
        found.append({"context": states, "pooled": pooled})
    return found[0], found[1]


def pixart(folder: Path, text: str) -> tuple[Any, Any]:
    pipeline = diffusers.PixArtAlphaPipeline(
        vae=None, transformer=None, scheduler=None, **components(folder, 1)
    )
    states, mask, null, null_mask = pipeline.encode_prompt(
        text, device="cpu", max_sequence_length=7
    )
    return {"context": states, "context_mask": mask}, {"context": null, "context_mask": null_mask}


def hunyuan(folder: Path, text: str) -> tuple[Any, Any]:
    pipeline = diffusers.HunyuanDiTPipeline(
        vae=None, transformer=None, scheduler=None, safety_checker=None, feature_extractor=None,
        requires_safety_checker=False, **components(folder, 2),
    )  # fmt: skip
    found: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for index, (name, length) in enumerate((("context", 5), ("context_t5", 7))):
        states, null, mask, null_mask = pipeline.encode_prompt(
            text, device="cpu", max_sequence_length=length, text_encoder_index=index
        )
        found[0].update({name: states, f"{name}_mask": mask})
        found[1].update({name: null, f"{name}_mask": null_mask})
    return found


def wan(folder: Path, text: str) -> tuple[Any, Any]:
    pipeline = diffusers.WanPipeline(vae=None, scheduler=None, **components(folder, 1))
    states, null = pipeline.encode_prompt(text, device="cpu", max_sequence_length=7)
    return {"context": states}, {"context": null}


def captioned(kind: type[Any], negative: str | None = None, **settings: Any) -> Any:
    """Encoding of pipelines that have states alone."""

    def encode(folder: Path, text: str) -> tuple[Any, Any]:
        pipeline = kind(
            vae=None, transformer=None, scheduler=None, **components(folder, 1), **settings
        )
        states, null = pipeline.encode_prompt(
            text, negative_prompt=negative, device="cpu", max_sequence_length=7
        )
        return {"context": states}, {"context": null}

    return encode


def hunyuan_image(folder: Path, text: str) -> tuple[Any, Any]:
    pipeline = diffusers.HunyuanImagePipeline(
        vae=None, transformer=None, scheduler=None, **components(folder, 2)
    )
    pipeline.tokenizer_max_length, pipeline.tokenizer_2_max_length = 40, 7
    names = ("context", "context_mask", "context_byt5", "context_byt5_mask")
    found = [
        dict(zip(names, pipeline.encode_prompt(each, device="cpu"), strict=True))
        for each in (text, "")
    ]
    return found[0], found[1]


def masked_video(kind: type[Any], **settings: Any) -> Any:
    """Encoding of LTX or Mochi."""

    def encode(folder: Path, text: str) -> tuple[Any, Any]:
        pipeline = kind(
            vae=None, transformer=None, scheduler=None, **components(folder, 1), **settings
        )
        states, mask, null, null_mask = pipeline.encode_prompt(
            text, device="cpu", max_sequence_length=7
        )
        positive = {"context": states, "context_mask": mask}
        return positive, {"context": null, "context_mask": null_mask}

    return encode


def hunyuan_video(folder: Path, text: str) -> tuple[Any, Any]:
    pipeline = diffusers.HunyuanVideoPipeline(
        vae=None, transformer=None, scheduler=None, **components(folder, 2)
    )
    found = []
    for each in (text, ""):
        states, pooled, mask = pipeline.encode_prompt(each, device="cpu", max_sequence_length=40)
        found.append({"context": states, "context_mask": mask, "pooled": pooled})
    return found[0], found[1]


def hunyuan_video_15(folder: Path, text: str) -> tuple[Any, Any]:
    """The transformer gives the pipeline its sizes alone."""
    pipeline_kind = diffusers.HunyuanVideo15Pipeline
    parts = components(folder, 2)
    found = []
    for each in (text, ""):
        states, mask = pipeline_kind._get_mllm_prompt_embeds(
            parts["text_encoder"], parts["tokenizer"], each, "cpu", tokenizer_max_length=40
        )
        glyphs, glyph_mask = pipeline_kind._get_byt5_prompt_embeds(
            parts["tokenizer_2"], parts["text_encoder_2"], each, "cpu", tokenizer_max_length=7
        )
        found.append(
            {"context": states, "context_mask": mask, "context_byt5": glyphs,
             "context_byt5_mask": glyph_mask}
        )  # fmt: skip
    return found[0], found[1]


def chroma(folder: Path, text: str) -> tuple[Any, Any]:
    """The pipeline's mask has one token more, which our backbone adds."""
    parts = components(folder, 1)
    pipeline = diffusers.ChromaPipeline(vae=None, transformer=None, scheduler=None, **parts)
    found = []
    for each in (text, ""):
        states, _, mask, *_ = pipeline.encode_prompt(
            each, device="cpu", max_sequence_length=7, do_classifier_free_guidance=False
        )
        tokens = parts["tokenizer"](each, padding="max_length", max_length=7, truncation=True)
        seen = torch.tensor(tokens["attention_mask"])
        assert mask.sum() == min(seen.sum() + 1, 7)
        found.append({"context": states, "context_mask": seen[None]})
    return found[0], found[1]


def aura_flow(folder: Path, text: str) -> tuple[Any, Any]:
    pipeline = diffusers.AuraFlowPipeline(
        vae=None, transformer=None, scheduler=None, **components(folder, 1)
    )
    states, _, null, _ = pipeline.encode_prompt(text, device="cpu", max_sequence_length=7)
    return {"context": states}, {"context": null}


def qwen_image(folder: Path, text: str) -> tuple[Any, Any]:
    """States of texts without padding, then padded."""
    pipeline = diffusers.QwenImagePipeline(
        vae=None, transformer=None, scheduler=None, **components(folder, 1)
    )
    found = []
    for each in (text, ""):
        states, mask = pipeline.encode_prompt(each, device="cpu")
        assert mask is None
        missing = 80 - states.shape[1]
        ones = torch.ones(1, states.shape[1], dtype=torch.int64)
        found.append(
            {"context": torch.nn.functional.pad(states, (0, 0, 0, missing)),
             "context_mask": torch.nn.functional.pad(ones, (0, missing))}
        )  # fmt: skip
    return found[0], found[1]


def flux2(folder: Path, text: str) -> tuple[Any, Any]:
    pipeline = diffusers.Flux2Pipeline(
        vae=None, transformer=None, scheduler=None, **components(folder, 1)
    )
    found = [
        pipeline.encode_prompt(
            each, device="cpu", max_sequence_length=60, text_encoder_out_layers=(1, 2, 3)
        )[0]
        for each in (text, "")
    ]
    return {"context": found[0]}, {"context": found[1]}


def flux2_klein(folder: Path, text: str) -> tuple[Any, Any]:
    pipeline = diffusers.Flux2KleinPipeline(
        vae=None, transformer=None, scheduler=None, **components(folder, 1)
    )
    found = [
        pipeline.encode_prompt(
            each, device="cpu", max_sequence_length=20, text_encoder_out_layers=(1, 2, 3)
        )[0]
        for each in (text, "")
    ]
    return {"context": found[0]}, {"context": found[1]}


def lumina2(folder: Path, text: str) -> tuple[Any, Any]:
    pipeline = diffusers.Lumina2Pipeline(
        vae=None, transformer=None, scheduler=None, **components(folder, 1)
    )
    states, mask, null, null_mask = pipeline.encode_prompt(
        text, device="cpu", max_sequence_length=40
    )
    return {"context": states, "context_mask": mask}, {"context": null, "context_mask": null_mask}


def sana(folder: Path, text: str) -> tuple[Any, Any]:
    pipeline = diffusers.SanaPipeline(
        vae=None, transformer=None, scheduler=None, **components(folder, 1)
    )
    called = inspect.signature(pipeline.__call__)
    states, mask, null, null_mask = pipeline.encode_prompt(
        text, device="cpu", max_sequence_length=7,
        complex_human_instruction=called.parameters["complex_human_instruction"].default,
    )  # fmt: skip
    return {"context": states, "context_mask": mask}, {"context": null, "context_mask": null_mask}


def z_image(folder: Path, text: str) -> tuple[Any, Any]:
    pipeline = diffusers.ZImagePipeline(
        vae=None, transformer=None, scheduler=None, **components(folder, 1)
    )
    found = []
    for (states,) in pipeline.encode_prompt(text, device="cpu", max_sequence_length=20):
        missing = 20 - len(states)
        ones = torch.ones(1, len(states), dtype=torch.int64)
        found.append(
            {"context": torch.nn.functional.pad(states, (0, 0, 0, missing))[None],
             "context_mask": torch.nn.functional.pad(ones, (0, missing))}
        )  # fmt: skip
    return found[0], found[1]


def of_layers(recipe: TextRecipe, *layers: int) -> TextRecipe:
    """``recipe`` of Flux.2 for an encoder of few layers."""
    parts = tuple(Part(1, State.HIDDEN, layer) for layer in layers)
    return replace(recipe, fields={"context": (parts,)})


_HUNYUAN_SHAPES = {"context": (40, 8), "context_mask": (40,)}
CASES: dict[str, tuple[TextRecipe, list[Any], Any, dict[str, Any]]] = {
    "wan": (text_recipes.WAN, ["umt5"], wan, {"context": (7, 8)}),
    "cosmos": (
        text_recipes.COSMOS,
        ["t5"],
        captioned(diffusers.CosmosTextToWorldPipeline, "", safety_checker=torch.nn.Identity()),
        {"context": (7, 8)},
    ),
    "allegro": (
        text_recipes.BY_CLASS["AllegroTransformer3DModel"][0],
        ["t5"],
        masked_video(diffusers.AllegroPipeline),
        {"context": (7, 8), "context_mask": (7,)},
    ),
    "cogview3": (
        text_recipes.COGVIEW3,
        ["t5"],
        captioned(diffusers.CogView3PlusPipeline),
        {"context": (7, 8)},
    ),
    "hunyuan_image": (
        text_recipes.HUNYUAN_IMAGE,
        [("qwen_vl", 8, 8, 4), ("t5", 12)],
        hunyuan_image,
        {**_HUNYUAN_SHAPES, "context_byt5": (7, 12), "context_byt5_mask": (7,)},
    ),
    "cogvideox": (
        text_recipes.COGVIDEOX,
        ["t5"],
        captioned(diffusers.CogVideoXPipeline),
        {"context": (7, 8)},
    ),
    "ltx": (
        text_recipes.LTX,
        ["t5"],
        masked_video(diffusers.LTXPipeline),
        {"context": (7, 8), "context_mask": (7,)},
    ),
    "mochi": (
        text_recipes.MOCHI,
        ["t5"],
        masked_video(diffusers.MochiPipeline),
        {"context": (7, 8), "context_mask": (7,)},
    ),
    "hunyuan_video": (
        text_recipes.HUNYUAN_VIDEO,
        [("llama", 8, 8, 4), ("clip", 12, 8, 3, 77)],
        hunyuan_video,
        {**_HUNYUAN_SHAPES, "pooled": (12,)},
    ),
    "hunyuan_video_15": (
        text_recipes.HUNYUAN_VIDEO_15,
        [("qwen_vl_text", 8, 8, 4), ("t5", 12)],
        hunyuan_video_15,
        {**_HUNYUAN_SHAPES, "context_byt5": (7, 12), "context_byt5_mask": (7,)},
    ),
    "chroma": (
        text_recipes.CHROMA,
        ["t5"],
        chroma,
        {"context": (7, 8), "context_mask": (7,)},
    ),
    "aura_flow": (text_recipes.AURA_FLOW, ["umt5"], aura_flow, {"context": (7, 8)}),
    "qwen_image": (
        text_recipes.QWEN_IMAGE,
        ["qwen_vl"],
        qwen_image,
        {"context": (80, 8), "context_mask": (80,)},
    ),
    "flux2": (
        of_layers(text_recipes.FLUX2, 1, 2, 3),
        [("mistral", 8, 8, 4)],
        flux2,
        {"context": (60, 24)},
    ),
    "flux2_klein": (
        of_layers(text_recipes.FLUX2_KLEIN, 1, 2, 3),
        [("qwen3_lm", 8, 8, 4)],
        flux2_klein,
        {"context": (20, 24)},
    ),
    "lumina2": (
        text_recipes.LUMINA2,
        ["gemma2"],
        lumina2,
        {"context": (40, 8), "context_mask": (40,)},
    ),
    "sana": (
        text_recipes.SANA,
        ["gemma2"],
        sana,
        {"context": (7, 8), "context_mask": (7,)},
    ),
    "z_image": (
        text_recipes.Z_IMAGE,
        ["qwen3"],
        z_image,
        {"context": (20, 8), "context_mask": (20,)},
    ),
    "sd": (text_recipes.SD, ["clip"], sd, {"context": (LENGTH, 8)}),
    "sdxl": (
        text_recipes.SDXL,
        ["clip", ("projected", 12, 10)],
        sdxl,
        {"context": (LENGTH, 20), "pooled": (10,)},
    ),
    "sd3": (
        text_recipes.SD3,
        [("projected", 8, 6), ("projected", 12, 10), ("t5", 24)],
        sd3,
        {"context": (LENGTH + 7, 24), "pooled": (16,)},
    ),
    "kolors": (text_recipes.KOLORS, ["glm"], kolors, {"context": (60, 8), "pooled": (8,)}),
    "suv": (
        text_recipes.SUV,
        ["t5", ("projected", 12, 10)],
        suv,
        {"context": (7, 8), "context_mask": (7,), "pooled": (10,)},
    ),
    "ltx2": (
        text_recipes.LTX2,
        ["gemma3"],
        ltx2,
        {"context": (15, 8), "context_mask": (15,)},
    ),
    "flux": (text_recipes.FLUX, ["clip", ("t5", 12)], flux, {"context": (7, 12), "pooled": (8,)}),
    "pixart": (text_recipes.PIXART, ["t5"], pixart, {"context": (7, 8), "context_mask": (7,)}),
    "hunyuan": (
        text_recipes.HUNYUAN_DIT,
        ["bert", ("t5", 12)],
        hunyuan,
        {"context": (5, 8), "context_mask": (5,), "context_t5": (7, 12), "context_t5_mask": (7,)},
    ),
}


def in_the_loop(
    folder: Path, recipe: TextRecipe, shapes: dict[str, Any], text: str
) -> list[dict[str, Any]]:
    """The fields of a text and of a dropped one, as a step that encodes has them."""
    loop = LoopEncoders(folder, recipe, shapes, False, {}, None)
    homes = {name: (0,) for name in loop.names}
    encoders = DeviceEncoders(loop, homes, 0, DiffusionProcess(Objective.FLOW))
    tokens = Tokenizers(folder, recipe, shapes)
    rows = [tokens(text), tokens.null()]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    batch |= {"index": torch.arange(2), "dropped": torch.tensor([False, True])}
    (encoded,) = Encoding(encoders.components, torch.device("cpu")).front([batch])
    made = encoders.finished(batch, encoded)
    return [{name: made[name][row] for name in shapes} for row in range(2)]


def same(ours: torch.Tensor, expected: torch.Tensor, is_near: bool = False) -> bool:
    """Equal to the bit, or to 1e-6."""
    expected = expected.to(ours.dtype)
    return torch.equal(ours, expected) or (is_near and torch.allclose(ours, expected, 0, 1e-6))


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()  # as pipelines run: attention has other kernels otherwise
def test_states_are_those_of_the_pipeline(name: str, tmp_path: Path) -> None:
    recipe, kinds, encode_prompt, shapes = CASES[name]
    encoders = TextEncoders(make_pipeline(tmp_path, *kinds), recipe, shapes)
    for text in (TEXT, SHORT):
        theirs, null = encode_prompt(tmp_path, text)
        for ours, expected in ((encoders(text), theirs), (encoders.null(), null)):
            assert ours.keys() == expected.keys() == shapes.keys()
            for field, value in ours.items():
                assert tuple(value.shape) == shapes[field]
                # Qwen-Image's texts have no padding there, Sana's empty one less.
                near = name in ("qwen_image", "sana")
                assert same(value, expected[field][0], near), field
    looped = in_the_loop(tmp_path, recipe, shapes, TEXT)
    for ours, expected in zip(looped, (encoders(TEXT), encoders.null()), strict=True):
        assert ours.keys() == expected.keys()
        assert all(torch.equal(value, expected[field]) for field, value in ours.items())
    if name == "sdxl":
        assert not encoders.null()["pooled"].any()
        (tmp_path / "model_index.json").write_text('{"force_zeros_for_empty_prompt": false}')
        assert TextEncoders(tmp_path, recipe, shapes).null()["pooled"].any()


def same_states(name: str, folder: Path, text: str, **shapes: Any) -> TextEncoders:
    """The encoders of a folder, whose states are those of the family's pipeline."""
    recipe, _, encode_prompt, known = CASES[name]
    encoders = TextEncoders(folder, recipe, shapes or known)
    theirs, null = encode_prompt(folder, text)
    for ours, expected in ((encoders(text), theirs), (encoders.null(), null)):
        for field, value in ours.items():
            assert torch.equal(value, expected[field][0].to(value.dtype)), field
    return encoders


@torch.no_grad()
def test_mochi_empty_prompt_has_no_tokens_if_the_pipeline_says_so(tmp_path: Path) -> None:
    recipe, kinds, _, shapes = CASES["mochi"]
    folder = make_pipeline(tmp_path, *kinds, force_zeros_for_empty_prompt=True)
    encoders = TextEncoders(folder, recipe, shapes)
    encode = masked_video(diffusers.MochiPipeline, force_zeros_for_empty_prompt=True)
    _, null = encode(folder, TEXT)
    for field, value in encoders.null().items():
        assert same(value, null[field][0]), field
    assert not encoders.null()["context_mask"].any()


@pytest.mark.parametrize("name", ["hunyuan_video_15", "hunyuan_image"])
@torch.no_grad()
def test_quoted_words_are_read(name: str, tmp_path: Path) -> None:
    recipe, kinds, encode_prompt, shapes = CASES[name]
    encoders = TextEncoders(make_pipeline(tmp_path, *kinds), recipe, shapes)
    text = 'a "red heart" of the “blue cat”, "red heart"'
    theirs, _ = encode_prompt(tmp_path, text)
    for field, value in encoders(text).items():
        assert same(value, theirs[field][0]), field
    assert encoders(text)["context_byt5_mask"].any()
    assert not encoders(TEXT)["context_byt5"].any()


@torch.no_grad()
def test_connectors_of_ltx_2_3(tmp_path: Path) -> None:
    """They have a projection for each modality, and may have no registers."""
    recipe, kinds, encode_prompt, shapes = CASES["ltx2"]
    folder = make_pipeline(tmp_path, *kinds)
    no_registers = dict.fromkeys(
        f"{of}_connector_num_learnable_registers" for of in ("video", "audio")
    )
    make_connectors(
        folder / "connectors", per_modality_projections=True, video_hidden_dim=8,
        audio_hidden_dim=8, **no_registers,
    )  # fmt: skip
    theirs, _ = encode_prompt(folder, SHORT)
    for field, value in TextEncoders(folder, recipe, shapes)(SHORT).items():
        assert same(value, theirs[field][0]), field


def test_connectors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    recipe, kinds, _, shapes = CASES["ltx2"]
    folder = make_pipeline(tmp_path, *kinds)
    odd = {"context": (12, 8), "context_mask": (12,)}
    with pytest.raises(EncodersError, match="multiples of 5 tokens, the backbone reads 12"):
        TextEncoders(folder, replace(recipe, length_option="text_length"), odd)
    make_connectors(folder / "connectors", caption_channels=9)
    with pytest.raises(EncodersError, match="connectors: they read 4 states of width 9, the enco"):
        TextEncoders(folder, recipe, shapes)
    (folder / "connectors/config.json").unlink()
    with pytest.raises(EncodersError, match="connectors/config.json is missing"):
        TextEncoders(folder, recipe, shapes)


@torch.no_grad()
def test_lumina2_negative_prompts_have_no_template(tmp_path: Path) -> None:
    recipe, kinds, _, shapes = CASES["lumina2"]
    encoders = TextEncoders(make_pipeline(tmp_path, *kinds), recipe, shapes)
    pipeline = diffusers.Lumina2Pipeline(
        vae=None, transformer=None, scheduler=None, **components(tmp_path, 1)
    )
    *_, null, mask = pipeline.encode_prompt(
        TEXT, negative_prompt="very old", device="cpu", max_sequence_length=40
    )
    ours = encoders("very old", negative=True)
    assert same(ours["context"], null[0]) and same(ours["context_mask"], mask[0])


@pytest.mark.parametrize("name", ["sd", "sdxl", "flux"])
@torch.no_grad()
def test_a_token_of_textual_inversion_stands_for_all_its_vectors(name: str, tmp_path: Path) -> None:
    _, kinds, _, _ = CASES[name]
    folder = make_pipeline(tmp_path, *kinds)
    words = ["<toy>", "<toy>_1", "<toy>_2", "<one>"]
    for place in range(1, len(kinds) + 1):
        tokens = folder / folder_name("tokenizer", place)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tokens)
        tokenizer.add_tokens(words)
        tokenizer.save_pretrained(tokens)
        where = folder / folder_name("text_encoder", place)
        kind = getattr(
            transformers, json.loads((where / "config.json").read_text())["architectures"][0]
        )
        encoder = kind.from_pretrained(where)
        torch.manual_seed(place)
        encoder.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        encoder.save_pretrained(where)
    encoders = same_states(name, folder, "a <toy> of <one>")
    ids = encoders.tokenizers("a <toy>")["text_encoder_ids"].tolist()
    assert [i for i in ids if i >= len(WORDS)] == [15, 16, 17]


@pytest.mark.parametrize("name", ["sd", "sdxl"])
@torch.no_grad()
def test_use_attention_mask_counts_where_the_pipeline_reads_it(name: str, tmp_path: Path) -> None:
    folder = make_pipeline(tmp_path, *CASES[name][1])
    edit(folder / "text_encoder/config.json", use_attention_mask=True)
    edit(folder / "tokenizer/tokenizer_config.json", pad_token="<pad>")
    same_states(name, folder, SHORT)


@torch.no_grad()
def test_both_clips_of_sd3_are_padded_as_the_first(tmp_path: Path) -> None:
    folder = make_pipeline(tmp_path, *CASES["sd3"][1])
    edit(folder / "tokenizer_2/tokenizer_config.json", model_max_length=1000)
    same_states("sd3", folder, SHORT)


class Soup:
    """bs4's, as far as captions need it."""

    def __init__(self, text: str, features: str) -> None:
        self.text = re.sub(r"<[^>]*>", "", text)


@pytest.mark.parametrize("there", [True, False])
@torch.no_grad()
def test_pixart_s_captions_are_cleaned_where_diffusers_cleans_them(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    from diffusers.pipelines.pixart_alpha import pipeline_pixart_alpha as pixart_alpha

    from megatron_pulse.encoders import tokens

    for package, stands_in in (
        ("BeautifulSoup", Soup),
        ("ftfy", SimpleNamespace(fix_text=lambda text: text)),
    ):
        monkeypatch.setattr(pixart_alpha, package, stands_in, raising=False)
    for name in ("is_bs4_available", "is_ftfy_available"):
        for module in (pixart_alpha, diffusers.utils):
            monkeypatch.setattr(module, name, lambda: there)
    tokens._cleaner.cache_clear()
    request.addfinalizer(tokens._cleaner.cache_clear)
    recipe, kinds, _, shapes = CASES["pixart"]
    folder = make_pipeline(tmp_path, *kinds)
    pipeline = diffusers.PixArtAlphaPipeline(
        vae=None, transformer=None, scheduler=None, **components(folder, 1)
    )
    encoders = TextEncoders(folder, recipe, shapes)
    assert encoders.made_by()["context"].endswith("cleaned captions)") == there
    for text in (
        " A <b>Red</b> bird https://x.com/bird.png", "the old#123 cat &amp; bird @heart", TEXT,
        "very-old-red-blue-bird of 123.45.67.89", "bird.png of the cat, free shipping",
    ):  # fmt: skip
        states, mask, *_ = pipeline.encode_prompt(
            text, do_classifier_free_guidance=False, device="cpu", clean_caption=True,
            max_sequence_length=7,
        )  # fmt: skip
        ours = encoders(text)
        assert torch.equal(ours["context"], states[0]) and ours["context_mask"].equal(mask[0])
    cut = encoders.tokenizers.excess("a bird https://x.com/a/b/c/d/e/f/g")
    assert (cut == 0) == there


def test_numbers_that_are_not_finite_name_the_encoder(tmp_path: Path) -> None:
    folder = make_pipeline(tmp_path, "clip")
    weights = folder / "text_encoder/model.safetensors"
    tensors = load_file(weights)
    (name,) = (name for name in tensors if name.endswith("layers.1.mlp.fc2.weight"))
    save_file({**tensors, name: tensors[name] * 1e8}, weights, {"format": "pt"})
    shapes = {"context": (LENGTH, 8)}
    assert TextEncoders(folder, text_recipes.SD, shapes)(TEXT)["context"].isfinite().all()
    said = "text_encoder, in float16, returns values that are not finite"
    with pytest.raises(EncodersError, match=f"{said}(.|\n)*--pulse-encoders-dtype"):
        TextEncoders(folder, text_recipes.SD, shapes, torch.float16)(TEXT)
    loop = LoopEncoders(folder, text_recipes.SD, shapes, False, {}, torch.float16)
    encoders = DeviceEncoders(loop, {"text_encoder": (0,)}, 0, DiffusionProcess(Objective.FLOW))
    tokens = Tokenizers(folder, text_recipes.SD, shapes)(TEXT)
    batch = {n: v[None] for n, v in tokens.items()} | {"index": torch.arange(1)}
    batch |= {"dropped": torch.tensor([False])}
    (encoded,) = Encoding(encoders.components, torch.device("cpu")).front([batch])
    assert encoders.not_finite() == []
    encoders.finished(batch, encoded)
    assert encoders.not_finite() == [said]


def test_what_the_folder_lacks_is_said_at_once(tmp_path: Path) -> None:
    shapes = {"context": (LENGTH, 20), "pooled": (10,)}
    folder = make_pipeline(tmp_path, "t5")
    with pytest.raises(EncodersError) as caught:
        TextEncoders(folder, text_recipes.SDXL, shapes)
    for words in (
        "text_encoder is T5EncoderModel, but CLIPTextModel is expected",
        "text_encoder_2/config.json is missing",
        "tokenizer_2 is missing",
    ):
        assert words in str(caught.value)
    wide = make_pipeline(tmp_path / "wide", "clip", ("projected", 16, 10))
    with pytest.raises(EncodersError, match=r"make context 9x24, but the backbone reads 9x20"):
        TextEncoders(wide, text_recipes.SDXL, shapes)


@pytest.mark.parametrize(
    ("backbone", "recipe"),
    [
        ("sd-v1.5", text_recipes.SD),
        ("sdxl", text_recipes.SDXL),
        ("sd3-medium", text_recipes.SD3),
        ("flux-dev", text_recipes.FLUX),
        ("pixart-tiny", text_recipes.PIXART),
        ("hunyuan-dit-v1.2", text_recipes.HUNYUAN_DIT),
        ("suv-tiny", text_recipes.SUV),
        ("uvit-s", None),
    ],
)
def test_recipes_of_backbones(backbone: str, recipe: TextRecipe | None) -> None:
    from megatron_pulse.integration.training_data import wanted_by

    chain = load_backbone(backbone)
    assert text_recipe(backbone, chain) == recipe
    needed = {} if recipe is None else {name: recipe.told(name) for name in recipe.fields}
    assert wanted_by(chain).made_by == needed, "stored texts that are made otherwise are refused"


def test_a_unet_that_the_family_lacks_is_kolors() -> None:
    config: dict[str, Any] = {
        "_class_name": "UNet2DConditionModel", "sample_size": 4, "block_out_channels": [8],
        "norm_num_groups": 4, "down_block_types": ["DownBlock2D"], "layers_per_block": 1,
        "up_block_types": ["UpBlock2D"], "attention_head_dim": 4, "cross_attention_dim": 6,
        "addition_embed_type": "text_time", "addition_time_embed_dim": 2,
        "projection_class_embeddings_input_dim": 8 + 12,
    }  # fmt: skip
    sdxl = load_published({**config, "transformer_layers_per_block": 1})
    assert text_recipe(sdxl.name, sdxl) == text_recipes.SDXL
    more = {"encoder_hid_dim": 8, "encoder_hid_dim_type": "text_proj"}
    chain = load_published({**config, **more})
    assert chain.name == "diffusers:UNet2DConditionModel"
    assert chain.batch_fields["context"].shape == (256, 8)
    assert text_recipe(chain.name, chain) == text_recipes.KOLORS


def test_classes_have_the_recipes_of_the_families_that_are_published_as_them() -> None:
    class Reads:
        batch_fields = {"timesteps": None, "context": None}

    chain: Any = Reads()
    assert text_recipe("diffusers:UNet2DConditionModel", chain) == text_recipes.SD
    chain.batch_fields = {"context": None, "guidance": None}
    assert text_recipe("diffusers:Flux2Transformer2DModel", chain) == text_recipes.FLUX2
    chain.batch_fields = {"context": None}
    assert text_recipe("diffusers:Flux2Transformer2DModel", chain) == text_recipes.FLUX2_KLEIN
    chain.batch_fields = {"context": None, "context_mask": None}
    assert text_recipe("diffusers:QwenImageTransformer2DModel", chain) == text_recipes.QWEN_IMAGE
    chain.batch_fields["reference_image"] = None
    seen = text_recipe("diffusers:QwenImageTransformer2DModel", chain)
    assert seen == text_recipes.QWEN_IMAGE_EDIT
    chain.batch_fields = {"context_t5": None}
    with pytest.raises(UserError, match="diffusers:SanaTransformer2DModel reads context"):
        text_recipe("diffusers:SanaTransformer2DModel", chain)


def opened(folder: Path) -> TextEncoders:
    return TextEncoders(folder, text_recipes.SD, {"context": (LENGTH, 8)})


def edit(path: Path, **said: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | said))


def test_files_that_no_library_should_be_given_are_refused(tmp_path: Path) -> None:
    """Pipes keep who opens them waiting, /dev/zero never ends, and an index may name any file."""
    folder = make_pipeline(tmp_path / "p", "clip")
    assert opened(folder)("a bird")["context"].shape == (LENGTH, 8)
    os.mkfifo(folder / "tokenizer/merges.txt")
    (folder / "tokenizer/zero.txt").symlink_to("/dev/zero")
    (folder / "text_encoder/more.json").symlink_to("nothing.json")
    weights = tmp_path / "elsewhere.safetensors"
    (folder / "text_encoder/model.safetensors").rename(weights)
    index = {
        "metadata": {"total_size": 1},
        "weight_map": dict.fromkeys(load_file(weights), f"../../{weights.name}"),
    }
    (folder / "text_encoder/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(EncodersError) as error:
        opened(folder)
    for words in (
        "tokenizer: merges.txt is no regular file",
        "tokenizer: zero.txt is no regular file",
        "text_encoder: more.json is a link to nothing.json, which does not exist",
        "text_encoder: model.safetensors.index.json: "
        "'../../elsewhere.safetensors' is not a file name",
    ):
        assert str(error.value).count(words) == 1, words
    (tmp_path / "vae").mkdir()
    os.mkfifo(tmp_path / "vae/config.json")
    with pytest.raises(AutoencoderError, match="vae: config.json is no regular file"):
        Autoencoder(tmp_path / "vae")


def test_code_in_a_folder_is_not_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_pipeline(tmp_path, "clip")
    (folder / "tokenizer/own.py").write_text("raise SystemExit('it ran')")
    edit(
        folder / "tokenizer/tokenizer_config.json",
        auto_map={"AutoTokenizer": [None, "own.Own"]},
        tokenizer_class="Own",
    )
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(EncodersError, match="contains custom code"):
        opened(folder)


@pytest.mark.parametrize("length", ["many", -5, 0, None, 1e30])
def test_lengths_that_are_none(tmp_path: Path, length: object) -> None:
    folder = make_pipeline(tmp_path, "clip")
    edit(folder / "tokenizer/tokenizer_config.json", model_max_length=length)
    with pytest.raises(EncodersError, match="tokenizer has no model_max_length from 1 to 16384"):
        opened(folder)


def test_tokens_beyond_those_of_the_encoder_are_refused(tmp_path: Path) -> None:
    """Few words, one of which has a large number."""
    folder = make_pipeline(tmp_path, "clip")
    path = folder / "tokenizer/tokenizer.json"
    said = json.loads(path.read_text())
    said["model"]["vocab"]["bird"] = 1000
    path.write_text(json.dumps(said))
    with pytest.raises(EncodersError, match="tokenizer has 1001 tokens, but text_encoder has 15"):
        opened(folder)


def test_a_pipeline_has_its_parts_in_its_own_folder(tmp_path: Path) -> None:
    named = {"../elsewhere": ["transformers", "CLIPTextModel"], "..": ["diffusers", "X"]}
    folder = make_pipeline(tmp_path / "p", "clip", text_encoder=["transformers", "C"], **named)
    make_pipeline(tmp_path, "clip")
    (tmp_path / "text_encoder").rename(tmp_path / "elsewhere")
    own, *others = parts_of(folder)
    assert own.num_bytes and not own.fault
    assert [part.fault for part in others] == [
        f"{name!r} is not a folder name in {folder}" for name in named
    ]
    assert not any(part.num_bytes for part in others)


def test_an_unknown_reading_is_refused() -> None:
    class Reads:
        batch_fields = {"context": None, "context_mask": None}

    chain: Any = Reads()
    with pytest.raises(UserError, match="reads context, context_mask"):
        text_recipe("sd-v1.5", chain)
