"""Texts dropped for one text encoder alone: --pulse-encoder-dropout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_pulse.data.build import open_dataset
from megatron_pulse.data.dataset import DataError, DiffusionDataset, FieldSpec
from megatron_pulse.data.fields import WantedFields, unencoded
from megatron_pulse.data.latents.layout import LatentLayout, LatentType
from megatron_pulse.data.latents.writer import LatentWriter
from megatron_pulse.data.microbatches import Split, make_microbatch
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import Objective
from megatron_pulse.encoders.text_encoders import TextEncoders
from megatron_pulse.encoders.tokens import Tokenizers
from megatron_pulse.integration.loop_encoders import DeviceEncoders, LoopEncoders
from megatron_pulse.integration.training_data import _require_encoders
from megatron_pulse.runtime.encoding.encoding import Encoding
from tests.data.captioned import captioned_digits
from tests.encoders.pipelines import make_pipeline
from tests.encoders.test_recipes import CASES, components

FLOW = DiffusionProcess(Objective.FLOW)
SEED, COUNT = 6, 10
RATES = {"text_encoder": 0.4, "text_encoder_2": 0.5, "text_encoder_3": 0.6}
ITEMS = [(index, 30 + index) for index in range(COUNT)]


def drawn(index: int, position: int) -> np.ndarray:
    """The numbers of one visit, by numpy alone: stream 11 of the seed."""
    key = np.array([SEED, 11], dtype=np.uint64)
    counter = np.array([0, 0, index, position], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).random(3)


def seen_by(text: str, item: tuple[int, int], rates: Mapping[str, float]) -> list[str]:
    """The text that each encoder sees; " " has no tokens, and is no default of pipelines."""
    return [
        " " if u < rates.get(name, 0) else text for u, name in zip(drawn(*item), RATES, strict=True)
    ]


def of_sd3(folder: Path, texts: list[str]) -> dict[str, Tensor]:
    pipeline = diffusers.StableDiffusion3Pipeline(
        vae=None, transformer=None, scheduler=None, **components(folder, 3)
    )
    states, _, pooled, _ = pipeline.encode_prompt(*texts, device="cpu", max_sequence_length=7)
    return {"context": states[0], "pooled": pooled[0]}


def of_flux(folder: Path, texts: list[str]) -> dict[str, Tensor]:
    pipeline = diffusers.FluxPipeline(
        vae=None, transformer=None, scheduler=None, **components(folder, 2)
    )
    states, pooled, _ = pipeline.encode_prompt(*texts[:2], device="cpu", max_sequence_length=7)
    return {"context": states[0], "pooled": pooled[0]}


def of_sdxl(folder: Path, texts: list[str]) -> dict[str, Tensor]:
    """An empty text has states of zeros, as the pipeline's negative prompt."""
    pipeline = diffusers.StableDiffusionXLPipeline(
        vae=None, unet=None, scheduler=None, **components(folder, 2)
    )
    states, _, pooled, _ = pipeline.encode_prompt(*texts[:2], device="cpu")
    ends = (slice(0, 8), slice(8, 20))
    for text, end in zip(texts, ends, strict=False):
        states[0][:, end] *= text != " "
    return {"context": states[0], "pooled": pooled[0] * (texts[1] != " ")}


ORACLES = {"sd3": of_sd3, "flux": of_flux, "sdxl": of_sdxl}


def in_the_loop(loop: LoopEncoders, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    homes = {name: (0,) for name in loop.names}
    encoders = DeviceEncoders(loop, homes, 0, FLOW)
    (encoded,) = Encoding(encoders.components, torch.device("cpu")).front([batch])
    return encoders.finished(batch, encoded)


def batch_of(data: DiffusionDataset, rates: Mapping[str, float], **how: Any) -> dict[str, Tensor]:
    return make_microbatch(data, ITEMS, FLOW, SEED, encoder_dropout=rates, **how)


@pytest.mark.parametrize("name", ORACLES)
@torch.no_grad()
def test_each_encoder_loses_its_text_alone(name: str, tmp_path: Path) -> None:
    """In the loop and stored ahead, as the pipeline with other prompts for some encoders."""
    recipe, kinds, _, shapes = CASES[name]
    folder = make_pipeline(tmp_path / "pipeline", *kinds)
    source = captioned_digits(tmp_path, COUNT)
    rates = {name: p for (name, p), _ in zip(RATES.items(), kinds, strict=False)}
    fields = {name: FieldSpec(shape) for name, shape in shapes.items()}
    wanted = WantedFields((3, 8, 8), fields)
    tokenizers, encoders = Tokenizers(folder, recipe, shapes), TextEncoders(folder, recipe, shapes)
    raw, _ = open_dataset(
        source, wanted=unencoded(wanted, tokenizers, fields), validation_fraction=0
    )
    layout = LatentLayout((3, 8, 8), 1, LatentType.FLOAT32, fields)
    for parts in ({}, encoders.parts):  # an earlier version's folder, and the record added
        how = (tmp_path / "store", layout, encoders.null(), COUNT, parts)
        with LatentWriter(*how) as writer:
            for number in writer.share():
                for i in writer.begin(number):
                    writer.add(raw.image(i), 0, encoders(raw.caption(i)))
        stored, _ = open_dataset(f"latents:{how[0]}", wanted=wanted, validation_fraction=0)
        if not parts:
            with pytest.raises(DataError, match="does not record which text encoder"):
                _require_encoders("data", stored, rates)
    loop = LoopEncoders(folder, recipe, shapes, False, {}, None)
    batch = batch_of(raw, rates)
    made, ahead = in_the_loop(loop, batch), batch_of(stored, rates)
    patterns = set()
    for row, item in enumerate(ITEMS):
        texts = seen_by(raw.caption(item[0]), item, rates)
        patterns.add(tuple(text == " " for text in texts))
        for field, value in ORACLES[name](folder, texts).items():
            assert torch.equal(made[field][row], value), (field, row)
            assert torch.equal(ahead[field][row], value), (field, row)
    assert len(patterns) > 3
    last = list(rates)[-1]
    alone, kept = batch_of(stored, {last: rates[last]}), batch_of(stored, rates)
    assert torch.equal(alone[f"{last}_dropped"], kept[f"{last}_dropped"])
    whole, none = batch_of(stored, rates, drop_probability=1.0), batch_of(stored, {})
    validated = batch_of(stored, rates, split=Split.VALIDATION)
    for field, null in encoders.null().items():
        assert torch.equal(whole[field], null.expand_as(whole[field]))
        assert torch.equal(validated[field], none[field])
    with pytest.raises(DataError, match="no texts of text_encoder_9, but of text_encoder, "):
        _require_encoders("data", stored, ["text_encoder_9"])


def test_parts_beyond_a_field_are_refused(tmp_path: Path) -> None:
    layout = LatentLayout((3, 8, 8), 1, fields={"context": FieldSpec((4, 8))})
    parts = {"text_encoder": {"context": [[(0, 4), (0, 9)]], "pooled": [[(0, 1)]]}}
    with (
        pytest.raises(DataError, match="is no part of a field") as error,
        LatentWriter(tmp_path, layout, text_parts=parts) as writer,
    ):
        writer.add(torch.zeros(3, 8, 8), 0, {"context": torch.zeros(4, 8)})
    assert len(error.value.faults) == 2
