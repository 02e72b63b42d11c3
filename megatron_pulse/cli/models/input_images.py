"""Pictures that ``pulse sample`` takes: ``--control-image``, ``--image``, and its ``--mask``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_pulse.errors import UserError, collecting, summarize

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_pulse.backbone.chain import Backbone
    from megatron_pulse.encoders.autoencoder import Autoencoder
    from megatron_pulse.encoders.image_encoder import ImageEncoder


SEEN = "seen"
"""Name, beside fields, of pictures for an encoder that reads them beside prompts."""


def controlled(
    files: Sequence[Path], backbone: Backbone, rows: list[Any], each: int
) -> tuple[list[Any], dict[str, Tensor]]:
    """Rows of a sheet, and the control branch's field for ``each`` samples of every row.

    One file serves all rows; several files are one per row. A single row is repeated for every
    file. Raises UserError for other counts, or if the backbone has no control branch.
    """
    if not files:
        return rows, {}
    from megatron_pulse.data.dataset import FieldSpec
    from megatron_pulse.data.images.conditioning import CONDITIONING, control_picture

    if CONDITIONING not in backbone.batch_fields:
        raise UserError(f"--control-image: {backbone.name} has no control branch: leave it out")
    rows, files = _one_for_each("--control-image", rows, files)
    spec = FieldSpec(backbone.batch_fields[CONDITIONING].shape)
    return rows, _fields_of(files, each, lambda file: {CONDITIONING: control_picture(file, spec)})


def inpainted(
    files: Sequence[tuple[Path, Path]],
    backbone: Backbone,
    rows: list[Any],
    each: int,
    autoencoder: Autoencoder | None,
) -> tuple[list[Any], dict[str, Tensor]]:
    """Rows of a sheet, and the fields of inpainting, of pairs of a picture and its mask.

    Pairs belong to rows as pictures of ``controlled`` do. Pictures are encoded by ``autoencoder``,
    to the means of their posteriors. Raises UserError, also if the backbone inpaints nothing.
    """
    if not files:
        return rows, {}
    from megatron_pulse.backbone.appended_fields import INPAINTING, MASKED_IMAGE
    from megatron_pulse.data.dataset import FieldSpec
    from megatron_pulse.data.images.appended_pictures import appended_latents
    from megatron_pulse.data.images.inpainting import masked_picture, reads_masks

    if not reads_masks(backbone.batch_fields):
        raise UserError(f"--image: {backbone.name} does not inpaint: leave it out")
    rows, files = _one_for_each("--image", rows, files)
    specs = {name: FieldSpec(backbone.batch_fields[name].shape) for name in INPAINTING}
    pixels = FieldSpec(_pixels(specs[MASKED_IMAGE].shape, autoencoder))

    def masked(pair: tuple[Path, Path]) -> dict[str, Tensor]:
        fields = masked_picture(*pair, pixels)
        return fields if autoencoder is None else appended_latents(fields, specs, autoencoder)

    return rows, _fields_of(files, each, masked)


def referenced(
    files: Sequence[Path],
    backbone: Backbone,
    rows: list[Any],
    each: int,
    autoencoder: Autoencoder | None,
) -> tuple[list[Any], dict[str, Tensor]]:
    """Rows of a sheet, and the field ``reference_image``, of pictures; ``SEEN`` are their pixels.

    Pictures belong to rows as those of ``controlled`` do. Raises UserError.
    """
    if not files:
        return rows, {}
    from megatron_pulse.backbone.appended_fields import REFERENCE_IMAGE
    from megatron_pulse.data.images.appended_pictures import appended_latents
    from megatron_pulse.data.images.inpainting import one_picture

    rows, files = _one_for_each("--image", rows, files)
    shape = _pixels(backbone.batch_fields[REFERENCE_IMAGE].shape, autoencoder)

    def seen(file: Path) -> dict[str, Tensor]:
        picture = one_picture(file, shape[0], (shape[1], shape[2]))
        fields = {REFERENCE_IMAGE: picture}
        if autoencoder is not None:
            fields = appended_latents(fields, {}, autoencoder)
        return {**fields, SEEN: picture}

    return rows, _fields_of(files, each, seen)


def _pixels(shape: tuple[int, ...], autoencoder: Autoencoder | None) -> tuple[int, ...]:
    """Shape of the picture that becomes a sample of ``shape``, (c, h, w)."""
    if autoencoder is None:
        return shape
    _, height, width = shape
    return (autoencoder.in_channels, height * autoencoder.factor, width * autoencoder.factor)


@dataclass(frozen=True)
class ClipSettings:
    """Values that SVD reads beside a clip's first frame, as in StableVideoDiffusionPipeline.

    ``noise`` is the strength of the noise on the first frame. It is drawn from ``seed``, as the
    pipeline's generator draws it if ``as_diffusers``.
    """

    fps: int = 7
    motion_bucket: float = 127.0
    noise: float = 0.02
    seed: int = 0
    as_diffusers: bool = False

    def noises(self, count: int, shape: tuple[int, ...]) -> Tensor:
        """Noise of ``count`` first frames of ``shape``, with its strength."""
        import torch

        from megatron_pulse.diffusion.noise import first_frame_noise

        if self.as_diffusers:
            generator = torch.Generator().manual_seed(self.seed)
            return self.noise * torch.randn((count, *shape), generator=generator)
        drawn = [first_frame_noise(self.seed, i, 0, shape)[1] for i in range(count)]
        return self.noise * torch.stack(drawn)


def continued(
    files: Sequence[Path],
    backbone: Backbone,
    rows: list[Any],
    each: int,
    autoencoder: Autoencoder | None,
    image_encoder: Callable[[str], ImageEncoder] | None = None,
    settings: ClipSettings | None = None,
) -> tuple[list[Any], dict[str, Tensor], tuple[int, ...]]:
    """Rows of a sheet, and the fields of a model that continues a first frame, of pictures.

    The third result is the shape of the noise on the first frames, empty without. Pictures belong
    to rows as those of ``controlled`` do. ``image_encoder`` opens that of SVD's pipeline folder.
    Raises UserError, also if the backbone continues none.
    """
    if not files:
        return rows, {}, ()
    import torch

    from megatron_pulse.backbone.appended_fields import IMAGE_EMBEDDING, TIME_IDS
    from megatron_pulse.data.dataset import FieldSpec, Framing
    from megatron_pulse.data.fields import default_value
    from megatron_pulse.data.images.inpainting import one_picture
    from megatron_pulse.encoders.first_frame import (
        FIRST_FRAME,
        first_frame_fields,
        seen_frame,
        starts_from_frame,
    )

    if not starts_from_frame(backbone.batch_fields):
        raise UserError(
            f"--image: {backbone.name} takes no --image alone: it continues no frame and reads no "
            "reference (--option reference=1 of FLUX.1 Kontext and its like); to inpaint needs "
            "--mask"
        )
    if autoencoder is None or not autoencoder.is_video:
        raise UserError("--image: give the autoencoder of the model's videos, --vae")
    rows, files = _one_for_each("--image", rows, files)
    shapes = {name: s.shape for name, s in backbone.batch_fields.items() if name in FIRST_FRAME}
    *_, height, width = backbone.sample_spec.shape
    count = backbone.sample_spec.shape[0 if autoencoder.frames_first else 1]
    count = (count - 1) * autoencoder.frame_factor + 1
    channels, factor = autoencoder.in_channels, autoencoder.factor
    vae = autoencoder

    encoder, noises, given = None, None, settings or ClipSettings()
    if (seen := seen_frame(shapes)) is not None:
        if image_encoder is None:
            raise UserError("--image: its pipeline folder embeds the first frame: give --encoders")
        encoder = image_encoder(seen)
    if IMAGE_EMBEDDING in shapes:
        noises = given.noises(len(files), (channels, height * factor, width * factor))

    def begun(frame: tuple[Path, int | None]) -> dict[str, Tensor]:
        file, number = frame
        clip = torch.zeros(channels, count, height * factor, width * factor)
        clip[:, 0] = one_picture(file, channels, (height * factor, width * factor))
        noise = None if noises is None else noises[number]
        return first_frame_fields(shapes, clip, vae, encoder, noise)

    # Rows of one picture share its fields, unless each has noise of its own.
    frames = [(file, None if noises is None else i) for i, file in enumerate(files)]
    fields = _fields_of(frames, each, begun)
    if (spec := backbone.batch_fields.get(TIME_IDS)) is not None:
        framing = Framing((1, 1), (0, 0), (1, 1), given.fps, given.motion_bucket)
        ids = default_value(TIME_IDS, FieldSpec(spec.shape, spec.dtype), framing)
        if ids is not None:
            ids[-1] = given.noise
            fields[TIME_IDS] = ids.expand(len(rows) * each, *ids.shape)
    return rows, fields, () if noises is None else tuple(noises.shape)


def _fields_of[File](
    files: Sequence[File], each: int, fields_of: Callable[[File], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Fields of ``each`` samples of every file; raises UserError with the faults of all files."""
    import torch

    found: dict[File, dict[str, Tensor]] = {}
    faults: list[str] = []
    for file in dict.fromkeys(files):
        with collecting(faults):
            found[file] = fields_of(file)
    if faults:
        raise UserError(summarize(faults))
    return {
        name: torch.stack([found[file][name] for file in files]).repeat_interleave(each, 0)
        for name in found[files[0]]
    }


def _one_for_each[File](
    flag: str, rows: list[Any], files: Sequence[File]
) -> tuple[list[Any], list[File]]:
    """Rows and files, as many of the one as of the other; raises UserError for other counts."""
    rows = rows * len(files) if len(rows) == 1 else rows
    each = [*files] * len(rows) if len(files) == 1 else [*files]
    if len(each) != len(rows):
        raise UserError(f"{flag}: {len(each)} pictures for {len(rows)} rows: give one, or as many")
    return rows, each
