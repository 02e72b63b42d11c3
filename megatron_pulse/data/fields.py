"""Conditioning fields by name: a backbone's needs, defaults, and null values.

A backbone names the fields it reads. Text (``context``, ``pooled``, ...) must come from the data.
Some other fields have a default if the data lacks them:

==================  =========================================================================
``*_mask``          ones, if the data has the masked field itself: every token is seen
``guidance``        3.5, the default scale in the distillation of FLUX.1-dev
``time_ids``        SDXL's (height, width, crop top, crop left, height, width)
``image_meta_size`` Hunyuan-DiT's (height, width, height, width, crop top, crop left)
``resolution``      PixArt's (height, width)
``aspect_ratio``    PixArt's (height / width,)
``patch_corner``    (0, 0): a whole sample, in patch-wise training
``added_time_ids``  SVD's (frames a second - 1, motion bucket, noise augmentation) of the clip
``original_size``   CogView's (height, width) of the image file; ``target_size`` of the picture,
                    ``crop_coords`` its corner
``ofs``             2, of image to video by CogVideoX 1.5
==================  =========================================================================

In ``time_ids`` and ``image_meta_size``, the first height and width are those of the image file. The
second are those of the picture made from it. The crop is the picture's corner in the scaled image.
The data provide all three as each sample's ``framing``; ``pulse data write-latents`` stores it as
the field ``framing``. In sampling the image is the requested picture, without a crop.

Dropping a sample's conditioning for classifier-free guidance turns states to zeros (or to the
data's null values) and their masks to ones. Fields that describe the picture's format (all above
but the masks) stay. So do a control image (``conditioning``, see ``images/conditioning.py``),
appended fields (``backbone/appended_fields.py``) and states of pictures (``PICTURE_STATES``), as
pipelines keep them in guidance. Of a backbone that reads ``image_latent`` and ``image_embedding``
(SVD), training drops the two together, and each alone (``APART``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_pulse.backbone.appended_fields import (
    APPENDED,
    FRAME_NOISE,
    IMAGE_EMBEDDING,
    IMAGE_LATENT,
    SEEN_FRAME,
    TIME_IDS,
)
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.shape_buckets import PATCH_CORNER
from megatron_pulse.data.captions import Encoded, Tokenizes
from megatron_pulse.data.dataset import (
    LATENT,
    DataError,
    Derived,
    DiffusionDataset,
    FieldSpec,
    Framing,
    Variation,
)
from megatron_pulse.data.images.conditioning import CONDITIONING
from megatron_pulse.encoders.text_recipe import is_text

GUIDANCE = 3.5
FRAMING = "framing"
"""Field of a latent folder with each sample's original size, crop's top and left, target size."""
FRAMING_SPEC = FieldSpec((6,), "int64")
SIZES = frozenset(
    {
        "time_ids", "image_meta_size", "resolution", "aspect_ratio", "original_size",
        "target_size", "crop_coords",
    }
)  # fmt: skip
"""Fields that describe a picture's size."""
OF_FRAMING = SIZES | {TIME_IDS}
"""Fields that a sample's framing gives."""
APART = (IMAGE_EMBEDDING, IMAGE_LATENT)
"""Fields of SVD's first frame: each probability of dropping is of the one, the other, and both."""
PICTURE_STATES = frozenset(
    {
        "encoder_hidden_states_image", "image_embeds", "control_hidden_states", "latents_clean",
        "latents_history_2x", "latents_history_4x",
    }
)  # fmt: skip
"""Pictures, frames and their states that diffusers' classes read, under the classes' names."""
KEPT = frozenset(
    {"guidance", "ofs", CONDITIONING, FRAMING, PATCH_CORNER, FRAME_NOISE}
    | OF_FRAMING | APPENDED | PICTURE_STATES
)  # fmt: skip
"""Fields that a dropped sample keeps."""


@dataclass(frozen=True)
class WantedFields:
    """Inputs that a backbone takes of every sample.

    ``shape`` is the sample's ``(c, h, w)``. ``fields`` are the inputs beside timesteps and labels.
    ``num_classes`` is None if no labels are read. A step with encoders takes other inputs (see
    ``unencoded``): images, encoded to latents of ``latent_shape``, and the fields of ``tokenize``
    for captions. ``made_by`` is the required provenance of precomputed fields and of ``latent``,
    compared where both are known (see ``made_otherwise``).
    """

    shape: tuple[int, ...]
    fields: Mapping[str, FieldSpec] = field(default_factory=dict)
    num_classes: int | None = None
    class_option: str = ""
    latent_shape: tuple[int, ...] | None = None
    tokenize: Tokenizes | None = None
    made_by: Mapping[str, str] = field(default_factory=dict)


def unencoded(
    wanted: WantedFields,
    tokenize: Tokenizes | None = None,
    text_fields: Collection[str] = (),
    pixels: tuple[int, ...] | None = None,
) -> WantedFields:
    """Inputs of a training step that encodes samples itself, for a backbone's ``wanted`` inputs.

    With ``tokenize``, token ids and masks replace the ``text_fields``. ``pixels`` is the shape of
    images that are encoded. The noise on SVD's first frame then replaces the fields that encoders
    make of this frame (``APART``).
    """
    if tokenize is not None:
        kept = {name: spec for name, spec in wanted.fields.items() if name not in text_fields}
        tokens = {name: FieldSpec(shape, "int64") for name, shape in tokenize.shapes.items()}
        made_by = {n: text for n, text in wanted.made_by.items() if n not in text_fields}
        made_by |= tokenize.made_by()
        wanted = replace(wanted, fields=kept | tokens, tokenize=tokenize, made_by=made_by)
    if pixels is not None:
        wanted = replace(wanted, shape=pixels, latent_shape=wanted.shape)
        if wanted.fields.keys() >= {*APART}:
            fields = {name: spec for name, spec in wanted.fields.items() if name not in APART}
            fields[FRAME_NOISE] = FieldSpec((pixels[0], *pixels[-2:]))
            wanted = replace(wanted, fields=fields)
    return wanted


def made_otherwise(made_by: Mapping[str, str], needed: Mapping[str, str]) -> list[str]:
    """Faults of fields whose provenance differs from ``needed`` (see ``made_differently``)."""
    return [
        f"{name} was made by {made_by[name]}, but the run needs {needed[name]}"
        for name in made_differently(made_by, needed)
    ]


def made_differently(made_by: Mapping[str, str], needed: Mapping[str, str]) -> list[str]:
    """Names of fields whose provenance differs from ``needed``, if both are known.

    A need may give only the kind: ``text_encoder last`` is met by ``text_encoder last (text_encoder
    CLIPTextModel ...)``.
    """
    return [
        name
        for name, text in needed.items()
        if name in made_by and made_by[name] != text and not made_by[name].startswith(f"{text} (")
    ]


def default_null(name: str, spec: FieldSpec, beside: Collection[str] = ()) -> Tensor | None:
    """Value of a dropped field among the fields ``beside``; None if the field stays."""
    is_apart = name in APART and {*APART} <= {*beside}
    if name in KEPT and not is_apart:
        return None
    fill = torch.ones if name.endswith("_mask") else torch.zeros
    return fill(spec.shape, dtype=spec.torch_dtype)


def framing_field(framing: Framing) -> Tensor:
    """Framing as stored in latent folders."""
    return torch.tensor([*framing.original, *framing.crop, *framing.target])


def default_value(name: str, spec: FieldSpec, framing: Framing) -> Tensor | None:
    """Value of a field missing from the data; None without a default of that shape."""
    height, width = framing.target
    known: dict[str, Sequence[float] | float] = {
        "guidance": GUIDANCE,
        "time_ids": [*framing.original, *framing.crop, *framing.target],
        "image_meta_size": [*framing.original, *framing.target, *framing.crop],
        "resolution": [height, width],
        "aspect_ratio": [height / width],
        "original_size": framing.original,
        "target_size": framing.target,
        "crop_coords": framing.crop,
        "ofs": 2.0,
        PATCH_CORNER: [0, 0],
        TIME_IDS: [framing.fps - 1, framing.motion_bucket, 0],
    }
    if name.endswith("_mask"):
        return torch.ones(spec.shape, dtype=spec.torch_dtype)
    if name not in known:
        return None
    value = torch.tensor(known[name], dtype=spec.torch_dtype)
    return value if tuple(value.shape) == spec.shape else None


def constants(
    wanted: Mapping[str, FieldSpec], given: Mapping[str, FieldSpec], framing: Framing
) -> dict[str, Tensor]:
    """Defaults of those ``wanted`` fields that are not ``given``."""
    found = {}
    for name, spec in wanted.items():
        masked = name.removesuffix("_mask")
        if name in given or (masked != name and masked not in given):
            continue
        if (value := default_value(name, spec, framing)) is not None:
            found[name] = value
    return found


_NO_CAPTIONS = "no captions. Write NAME.txt beside each picture, or metadata.csv"
_NO_TEXTS = "no texts. Rewrite the data with encoders (pulse data write-latents --encoders DIR)"


_BESIDE = (
    "'pulse data write-latents' takes it from FOLDER.fields/NAME.safetensors beside FOLDER/NAME.*"
)


def _needs_files(name: str) -> bool:
    """True of a field that neither encoders nor folders of pictures give."""
    return not is_text(name) and name not in {CONDITIONING, FRAME_NOISE, *APPENDED, *SEEN_FRAME}


def fields_of_samples(backbone: Backbone) -> dict[str, FieldSpec]:
    """Fields that ``backbone`` reads of every sample of its first shape, beside its label.

    Masks of ``bool`` are int64, as data hold them.
    """
    return {
        name: FieldSpec(spec.shape, "int64" if spec.dtype == "bool" else spec.dtype)
        for name, spec in backbone.batch_fields.items()
        if name not in ("timesteps", "labels")
    }


class Fitted(Derived):
    """``source`` with exactly the fields of ``taken``: defaults added, other fields removed.

    ``faults`` lists the fields that cannot be provided.
    """

    def __init__(self, source: DiffusionDataset, taken: WantedFields) -> None:
        wanted, tokens = taken.fields, set[str]()
        self._known: Mapping[str, int] = {}
        if taken.tokenize is not None:
            tokens = set(taken.tokenize.shapes)
            if source.has_captions:
                made = {name: wanted[name] for name in tokens}
                source = Encoded(source, taken.tokenize, made)
            else:
                self._known = taken.tokenize.known
        super().__init__(source)
        self.fields = dict(wanted)
        self.latent_shape = taken.latent_shape
        self._constants = constants(wanted, source.fields, Framing.whole(source.pixel_size))
        framed = OF_FRAMING & self._constants.keys() if self.frames else ()
        self._framed = {name: wanted[name] for name in framed}
        self._taken = [name for name in wanted if name in source.fields]
        if taken.tokenize is not None:
            self.text_parts = taken.tokenize.parts
        self.text_parts = {
            encoder: kept
            for encoder, parts in self.text_parts.items()
            if (kept := {name: part for name, part in parts.items() if name in wanted})
        }
        self.faults = []
        for name, spec in wanted.items():
            reads = "the text encoders read" if name in tokens else "the backbone reads"
            if name in source.fields and not source.fields[name].fits(spec):
                self.faults.append(f"{reads} {name} ({spec}), the data has {source.fields[name]}")
            elif name not in source.fields and name not in self._constants:
                none = f"none. {_BESIDE}" if _needs_files(name) else "none"
                if name in tokens:
                    none = _NO_TEXTS if LATENT in source.made_by else _NO_CAPTIONS
                self.faults.append(f"{reads} {name} ({spec}), the data has {none}")
        if self._known:
            self.faults += self._unknown_tokens(source.null_conditioning())

    def conditioning(self, index: int, variation: Variation | None = None) -> dict[str, Tensor]:
        given = self.source.conditioning(index, variation) if self._taken else {}
        if faults := self._unknown_tokens(given):
            remedy = "Rewrite the folder with these encoders."
            raise DataError(self.source.describe(index), faults, remedy)
        sizes = {}
        if self._framed:
            sizes = constants(self._framed, {}, self.source.framing(index, variation))
        return {**self._constants, **sizes, **{name: given[name] for name in self._taken}}

    def uncaptioned(self, index: int) -> bool:
        if not self._known:
            return super().uncaptioned(index)
        given, null = self.source.conditioning(index), self.source.null_conditioning()
        named = self._known.keys() & null.keys() & given.keys()
        return bool(named) and all(torch.equal(given[name], null[name]) for name in named)

    def _unknown_tokens(self, given: Mapping[str, Tensor]) -> list[str]:
        """Faults of stored token ids outside an encoder's vocabulary, which would crash a
        GPU run."""
        faults = []
        for name in self._known.keys() & given.keys():
            least, most = given[name].min().item(), given[name].max().item()
            if least < 0 or most >= self._known[name]:
                known = f"those of the text encoders are 0 to {self._known[name] - 1}"
                faults.append(f"{name} has tokens from {least} to {most}, and {known}")
        return sorted(faults)

    def null_conditioning(self) -> dict[str, Tensor]:
        null = self.source.null_conditioning()
        return {name: null[name] for name in self._taken if name in null}
