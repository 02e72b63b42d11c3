"""Samples as they are, for a training step that encodes them itself."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_pulse.data.build import open_buckets, open_dataset
from megatron_pulse.data.captions import Encoded
from megatron_pulse.data.dataset import ArrayDataset, DataError, DiffusionDataset, FieldSpec
from megatron_pulse.data.fields import WantedFields, unencoded
from megatron_pulse.data.latents.layout import LatentLayout
from megatron_pulse.data.latents.writer import LatentWriter
from megatron_pulse.data.microbatches import DiffusionLoader, Split, make_microbatch, noised_here
from megatron_pulse.data.sampler import MicrobatchSampler
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import Objective
from megatron_pulse.encoders.autoencoder import Autoencoder
from megatron_pulse.encoders.text_encoders import TextEncoders
from megatron_pulse.encoders.tokens import EncodersError, Tokenizers
from megatron_pulse.errors import collecting
from model_specs.common.text_recipes import SDXL
from tests.cli.test_data import make_vae
from tests.data.captioned import captioned_digits
from tests.encoders.pipelines import LENGTH, make_pipeline
from tests.ranks import run_ranks

FIELDS = {"context": FieldSpec((LENGTH, 20)), "pooled": FieldSpec((10,))}
LATENTS = WantedFields((2, 4, 4), {**FIELDS, "time_ids": FieldSpec((6,), "float32")}, num_classes=1)
SHAPES = {name: spec.shape for name, spec in FIELDS.items()}
FLOW = DiffusionProcess(Objective.FLOW)
ITEMS = [(index, 30 + index) for index in range(8)]
TOKENS = [f"text_encoder{at}_{what}" for at in ("", "_2") for what in ("ids", "mask")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_pipeline(tmp_path_factory.mktemp("sdxl"), "clip", ("projected", 12, 10))
    make_vae(
        root / "vae", block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return root


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return captioned_digits(tmp_path_factory.mktemp("digits"), 12)


@pytest.fixture(scope="module")
def data(folder: Path, source: str) -> DiffusionDataset:
    wanted = unencoded(LATENTS, Tokenizers(folder, SDXL, SHAPES), FIELDS, pixels=(3, 8, 8))
    train, _, which = open_buckets(source, [wanted])
    assert which == (0,)
    return train


def batch_of(
    data: DiffusionDataset, needs_image: bool = True, needs_pixels: bool = True
) -> dict[str, Tensor]:
    return make_microbatch(
        data, ITEMS, FLOW, 5, 0.4, needs_image=needs_image, needs_pixels=needs_pixels
    )


def test_what_a_step_is_given(data: DiffusionDataset) -> None:
    batch = batch_of(data)
    assert {name: tuple(value.shape[1:]) for name, value in batch.items()} == {
        "pixels": (3, 8, 8), "noise": (2, 4, 4), "posterior": (2, 4, 4), "time_ids": (6,),
        **dict.fromkeys(("timesteps", "labels", "index", "dropped", "positions"), ()),
        **dict.fromkeys(TOKENS, (LENGTH,)),
    }  # fmt: skip
    assert 0 < batch["dropped"].sum() < len(ITEMS)
    for name, first in (("needs_image", "noise"), ("needs_pixels", "pixels")):
        less = batch_of(data, **{name: False})
        assert first not in less and less.keys() < batch.keys()
        assert all(torch.equal(value, batch[name]) for name, value in less.items())
    assert data.pixel_size == (8, 8) and data.latent_shape == (2, 4, 4)


def read_with_workers(data: DiffusionDataset) -> None:
    def loader(workers: int) -> DiffusionLoader:
        sampler = MicrobatchSampler(len(data), 4, 2, 1, 2, seed=5)
        return DiffusionLoader(data, sampler, FLOW, 5, 0.4, num_workers=workers)

    alone, forked = ([*islice(iter(loader(n)), 3)] for n in (0, 1))
    for a, b in zip(alone, forked, strict=True):
        assert all(torch.equal(value, b[name]) for name, value in a.items())


def test_workers_make_the_same(data: DiffusionDataset) -> None:
    run_ranks(1, read_with_workers, data)


def test_encoding_them_gives_the_bits_of_data_encoded_ahead(
    data: DiffusionDataset, folder: Path, source: str
) -> None:
    batch = batch_of(data)
    encoders, vae = TextEncoders(folder, SDXL, SHAPES), Autoencoder(folder / "vae")
    mean, deviation = vae.posterior(batch["pixels"])
    pictures, _ = open_dataset(source, 8)
    ahead = [vae.posterior(pictures.image(i)[None]) for i in range(len(pictures))]
    means, deviations = map(torch.cat, zip(*ahead, strict=True))

    class Latents(ArrayDataset):
        def caption(self, index: int) -> str:
            return pictures.caption(index)

        def deviation(self, index: int, variation: object = None) -> Tensor:
            return deviations[index]

    latents = Latents(means.numpy(), np.zeros(len(means)), 1)
    stored = batch_of(Encoded(latents, encoders, FIELDS))
    made = noised_here(batch, mean, deviation, FLOW)
    rows = [{name: batch[name][i] for name in TOKENS} for i in range(len(ITEMS))]
    texts = [encoders.encode(row) for row in rows]
    fields = {name: torch.stack([text[name] for text in texts]) for name in FIELDS}
    made |= encoders.dropped(fields, batch["dropped"])
    assert made.keys() == {"noisy", "target", *FIELDS}
    for name, value in made.items():
        assert torch.equal(value, stored[name]), name
    assert not made["pooled"][batch["dropped"]].any() and fields["pooled"].all()
    exact = noised_here(batch, mean, torch.zeros_like(deviation), FLOW)["noisy"]
    assert not torch.equal(exact, made["noisy"])


def test_validation_is_the_same_at_every_evaluation(data: DiffusionDataset) -> None:
    """Noise is the sample's, and every eighth position has the same time."""
    first, second = (
        make_microbatch(data, [(3, position)], FLOW, 5, split=Split.VALIDATION)
        for position in (0, 704)
    )
    assert first.pop("positions").tolist() == [0] and second["positions"].tolist() == [704]
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_what_the_data_lack_is_listed(folder: Path, source: str, tmp_path: Path) -> None:
    wanted = unencoded(LATENTS, Tokenizers(folder, SDXL, SHAPES), FIELDS, pixels=(3, 8, 8))
    with pytest.raises(DataError) as error:
        open_dataset("digits8", wanted=wanted)
    said = str(error.value)
    assert "its images are 1x8x8, the autoencoder takes 3x8x8" in said
    for name in TOKENS:
        assert f"the text encoders read {name} ({LENGTH} int64), the data has no captions" in said
    with pytest.raises(EncodersError, match="tokenizer_2 is missing"):
        Tokenizers(make_pipeline(tmp_path / "sd", "clip"), SDXL, SHAPES)


def test_stored_tokens_of_no_caption_are_dropped(folder: Path, tmp_path: Path) -> None:
    """So that the step makes of them what stands for no prompt, which may be zeros."""
    tokenizers = Tokenizers(folder, SDXL, SHAPES)
    fields = {name: FieldSpec(shape, "int64") for name, shape in tokenizers.shapes.items()}
    layout = LatentLayout((2, 4, 4), 1, fields=fields)
    with LatentWriter(tmp_path, layout, tokenizers.null()) as writer:
        for i in range(8):
            writer.add(torch.full((2, 4, 4), float(i)), 0, tokenizers("a bird" if i % 2 else ""))
    wanted = unencoded(WantedFields((2, 4, 4), FIELDS), tokenizers, FIELDS)
    train, _ = open_dataset(f"latents:{tmp_path}", wanted=wanted, validation_fraction=0)
    batch = make_microbatch(train, ITEMS, FLOW, 5)
    assert batch["dropped"].tolist() == [True, False] * 4


@pytest.mark.parametrize(
    ("token", "has"), [(-1, "-1 to 7"), (15, "1 to 15"), (1 << 40, "1 to 1099511627776")]
)
def test_stored_tokens_that_no_encoder_knows_are_refused(
    folder: Path, tmp_path: Path, token: int, has: str
) -> None:
    """They would be an index beyond its table, which on a GPU is an error of the device."""
    tokenizers = Tokenizers(folder, SDXL, SHAPES)
    fields = {name: FieldSpec(shape, "int64") for name, shape in tokenizers.shapes.items()}
    with LatentWriter(tmp_path, LatentLayout((2, 4, 4), 1, fields=fields)) as writer:
        for i in range(4):
            made = {name: value.clone() for name, value in tokenizers(f"a bird {i}").items()}
            if i == 2:
                made["text_encoder_2_ids"][5] = token
            writer.add(torch.zeros(2, 4, 4), 0, made)
    wanted = unencoded(WantedFields((2, 4, 4), FIELDS), tokenizers, FIELDS)
    train, validation = open_dataset(f"latents:{tmp_path}", wanted=wanted)
    said: list[str] = []
    for data in (train, validation):
        for i in range(len(data)):
            with collecting(said):
                data.conditioning(i)
    (fault,) = said
    assert fault.startswith(
        f"sample 2 of {tmp_path / 'latent-00000.npy'}: text_encoder_2_ids has tokens from {has}, "
        "and those of the text encoders are 0 to 14"
    )
