"""Masks of inpainting: random ones of (seed, sample), those of files, and the masked pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megatron_pulse.data.build import InpaintMasks, open_buckets
from megatron_pulse.data.dataset import (
    CorruptSample,
    DataError,
    DiffusionDataset,
    FieldSpec,
    Variation,
)
from megatron_pulse.data.fields import WantedFields
from megatron_pulse.data.images.folder import ImageFiles
from megatron_pulse.data.images.inpainting import (
    inpainting_specs,
    mask_of_latents,
    random_mask,
)
from megatron_pulse.data.microbatches import make_microbatch
from megatron_pulse.diffusion.objectives import DiffusionProcess, Objective

SIDE = 16
PROCESS = DiffusionProcess(Objective.FLOW)
WANTED = WantedFields((1, SIDE, SIDE), inpainting_specs((1, SIDE, SIDE)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve pictures in ``photos``; in ``masks``, the left columns are white."""
    draw = np.random.default_rng(0)
    for name in ("photos", "masks"):
        (tmp_path / name).mkdir()
    for i in range(12):
        picture = draw.integers(0, 256, (SIDE, SIDE), dtype=np.uint8)
        Image.fromarray(picture).save(tmp_path / f"photos/{i}.png")
        mask = np.zeros((SIDE, SIDE), np.uint8)
        mask[:, : i + 1] = 200
        Image.fromarray(mask).save(tmp_path / f"masks/{i}.png")
    return tmp_path


def opened(folder: Path, place: str = "random", seed: int = 3) -> DiffusionDataset:
    spec = f"folder:{folder / 'photos'}"
    return open_buckets(spec, [WANTED], inpaint=InpaintMasks(place, seed))[0]


def test_random_masks_follow_from_seed_and_sample() -> None:
    masks = [random_mask(3, i, (SIDE, 2 * SIDE)) for i in range(200)]
    assert all(mask.unique().tolist() in ([0, 1], [1]) for mask in masks)
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) > 150
    assert torch.equal(masks[7], random_mask(3, 7, (SIDE, 2 * SIDE)))
    assert not torch.equal(masks[7], random_mask(4, 7, (SIDE, 2 * SIDE)))
    share = torch.stack(masks).mean()
    assert 0.3 < share < 0.6
    assert 10 < sum(bool(mask.all()) for mask in masks) < 40


def test_a_sample_keeps_its_mask_at_every_visit(folder: Path) -> None:
    data = opened(folder)
    first, later = (make_microbatch(data, [(4, p), (2, p)], PROCESS, 3) for p in (0, 50))
    assert not torch.equal(first["noisy"], later["noisy"])
    for name in ("inpaint_mask", "masked_image"):
        assert torch.equal(first[name], later[name])
    image, mask = data.image(4), first["inpaint_mask"][0]
    assert torch.equal(first["masked_image"][0], torch.where(mask == 1, 0.0, image))
    assert not torch.equal(mask, opened(folder, seed=4).conditioning(4)["inpaint_mask"])


def test_a_dropped_sample_keeps_mask_and_picture(folder: Path) -> None:
    data = opened(folder)
    kept, dropped = (
        make_microbatch(data, [(1, 0)], PROCESS, 3, drop_probability=p) for p in (0, 1)
    )
    assert dropped["dropped"].all() and not kept["dropped"].any()
    assert torch.equal(kept["masked_image"], dropped["masked_image"])
    assert torch.equal(kept["inpaint_mask"], dropped["inpaint_mask"])


def test_masks_of_files_are_mirrored_with_their_pictures(folder: Path) -> None:
    data = opened(folder, str(folder / "masks"))
    for index in range(len(data)):
        count = int(Path(data.describe(index)).stem) + 1
        for flip in (False, True):
            fields = data.conditioning(index, Variation(flip=flip))
            mask = fields["inpaint_mask"].flip(-1) if flip else fields["inpaint_mask"]
            assert mask[..., :count].all() and not mask[..., count:].any()
            image = data.image(index, Variation(flip=flip))
            assert torch.equal(fields["masked_image"], image * (1 - fields["inpaint_mask"]))


def test_a_mask_of_other_proportions_makes_the_sample_corrupt(folder: Path) -> None:
    data = opened(folder, str(folder / "masks"))
    names = [Path(data.describe(i)).name for i in range(2)]
    Image.new("L", (2 * SIDE, 2 * SIDE), 255).save(folder / "masks" / names[0])  # only larger
    Image.new("L", (SIDE, 2 * SIDE)).save(folder / "masks" / names[1])
    assert data.conditioning(0)["inpaint_mask"].all()
    said = f"masks/{names[1]}: it has 16x32 pixels, and its picture .*: their proportions differ"
    with pytest.raises(CorruptSample, match=said):
        data.conditioning(1)


@pytest.mark.parametrize("place", ["random", "masks"])
def test_pictures_to_inpaint_are_decoded_once(
    place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = opened(folder, place if place == "random" else str(folder / place))
    read = list[str]()
    decoded = ImageFiles._decoded

    def count(self: ImageFiles, index: int) -> Image.Image:
        read.append(str(self.files[index]))
        return decoded(self, index)

    monkeypatch.setattr(ImageFiles, "_decoded", count)
    make_microbatch(data, [(i, i) for i in range(4)], PROCESS, 0, 0.0)
    photos = [path for path in read if "/photos/" in path]
    assert len(photos) == len(set(photos)) == 4


def test_a_picture_without_a_mask_is_refused(folder: Path) -> None:
    (folder / "masks/3.png").unlink()
    with pytest.raises(DataError, match=r"(?s)there is no .*masks/3\.png.*needs a mask"):
        opened(folder, str(folder / "masks"))


@pytest.mark.parametrize("channels", [1, 16])
def test_mask_of_latents_is_the_nearest_pixel_or_all(channels: int) -> None:
    mask = random_mask(0, 5, (SIDE, SIDE))
    found = mask_of_latents(mask, FieldSpec((channels, SIDE // 4, SIDE // 4)))
    if channels == 1:
        assert torch.equal(found[0], mask[0, ::4, ::4])
    else:  # as diffusers' FluxFillPipeline packs it
        rows = mask.view(SIDE // 4, 4, SIDE // 4, 4).permute(1, 3, 0, 2)
        assert torch.equal(found, rows.reshape(16, SIDE // 4, SIDE // 4))
