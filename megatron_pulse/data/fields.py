"""Conditioning fields by name: what a backbone asks for, defaults, and null values.

A backbone names the fields it reads. Text (``context``, ``pooled``, ...) must come from the data.
Some others have a default where the data lacks them:

==================  =========================================================================
``*_mask``          ones, where the data has the masked field itself: every token is seen
``guidance``        3.5, the scale that FLUX.1-dev was distilled for by default
``time_ids``        SDXL's (height, width, crop top, crop left, height, width)
``image_meta_size`` Hunyuan-DiT's (height, width, height, width, crop top, crop left)
``resolution``      PixArt's (height, width)
``aspect_ratio``    PixArt's (height / width,)
==================  =========================================================================

The first height and width of ``time_ids`` and ``image_meta_size`` are those of the image file, the
second those of the picture made of it, and the crop says where in the scaled image that was: what
the data know as each sample's ``framing``. ``pulse data write-latents`` writes it as the field
``framing``. In sampling the image is the picture asked for, without a crop.

When a sample's conditioning is dropped for classifier-free guidance, states become zeros (unless
the data says what the empty prompt's are) and their masks ones; what describes the picture
rather than what it shows (all fields above but the masks) stays, and so does another picture that
it follows (``conditioning``, see ``images/conditioning.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_pulse.data.dataset import DataError, Derived, DiffusionDataset, FieldSpec, Framing
from megatron_pulse.data.images.conditioning import CONDITIONING
from megatron_pulse.data.text.encoded import Encoded, Tokenizes

GUIDANCE = 3.5
FRAMING = "framing"
"""Where a latent folder has each sample's: original size, crop's top and left, target size."""
FRAMING_SPEC = FieldSpec((6,), "int64")
SIZES = frozenset({"time_ids", "image_meta_size", "resolution", "aspect_ratio"})
"""Fields that tell of a picture's size."""
KEPT = frozenset({"guidance", CONDITIONING, FRAMING, *SIZES})
"""Fields that a dropped sample keeps."""


@dataclass(frozen=True)
class WantedFields:
    """What a backbone takes of every sample.

    ``shape`` is its ``(c, h, w)``, ``fields`` what it reads beside timesteps and labels,
    ``num_classes`` how many classes it knows (None where it reads no labels), and ``class_option``
    which option says so (empty where none does). A step that encodes
    takes something else (see ``unencoded``): images, of which it makes latents of ``latent_shape``,
    and what ``tokenize`` makes of captions. Fields written ahead, and ``latent``, must have been
    ``made_by`` these, as far as both are known (see ``made_otherwise``).
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
    pixels: tuple[int, int] | None = None,
) -> WantedFields:
    """What a training step takes that encodes samples itself to what a backbone has ``wanted``.

    With ``tokenize`` it makes the ``text_fields`` of token ids and masks. ``pixels`` are the
    autoencoder's (channels, factor): it makes latents of images that are so many times higher and
    wider.
    """
    if tokenize is not None:
        kept = {name: spec for name, spec in wanted.fields.items() if name not in text_fields}
        tokens = {name: FieldSpec(shape, "int64") for name, shape in tokenize.shapes.items()}
        made_by = {n: text for n, text in wanted.made_by.items() if n not in text_fields}
        made_by |= tokenize.made_by()
        wanted = replace(wanted, fields=kept | tokens, tokenize=tokenize, made_by=made_by)
    if pixels is not None:
        channels, factor = pixels
        _, height, width = wanted.shape
        shape = (channels, height * factor, width * factor)
        wanted = replace(wanted, shape=shape, latent_shape=wanted.shape)
    return wanted


def made_otherwise(made_by: Mapping[str, str], needed: Mapping[str, str]) -> list[str]:
    """Which fields are not of what is ``needed``, where both are told.

    Who needs only a kind says only that: ``text_encoder last`` is met by
    ``text_encoder last (text_encoder CLIPTextModel ...)``.
    """
    return [
        f"{name} was made by {made_by[name]}; needed is {text}"
        for name, text in needed.items()
        if name in made_by and made_by[name] != text and not made_by[name].startswith(f"{text} (")
    ]


def default_null(name: str, spec: FieldSpec) -> Tensor | None:
    """The value of a dropped field; None if it stays."""
    if name in KEPT:
        return None
    fill = torch.ones if name.endswith("_mask") else torch.zeros
    return fill(spec.shape, dtype=spec.torch_dtype)


def framing_field(framing: Framing) -> Tensor:
    """A framing as latent folders have it."""
    return torch.tensor([*framing.original, *framing.crop, *framing.target])


def default_value(name: str, spec: FieldSpec, framing: Framing) -> Tensor | None:
    """The value of a field that the data lacks; None if it has no default of that shape."""
    height, width = framing.target
    known: dict[str, Sequence[float] | float] = {
        "guidance": GUIDANCE,
        "time_ids": [*framing.original, *framing.crop, *framing.target],
        "image_meta_size": [*framing.original, *framing.target, *framing.crop],
        "resolution": [height, width],
        "aspect_ratio": [height / width],
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
    """Defaults of those ``wanted`` fields that are not ``given`` and have one."""
    found = {}
    for name, spec in wanted.items():
        masked = name.removesuffix("_mask")
        if name in given or (masked != name and masked not in given):
            continue
        if (value := default_value(name, spec, framing)) is not None:
            found[name] = value
    return found


_NO_CAPTIONS = "no captions: write NAME.txt beside each picture, or metadata.csv"
_NO_TEXTS = "no texts: write it anew with the encoders (pulse data write-latents --encoders DIR)"


class Fitted(Derived):
    """``source`` with exactly the fields of ``taken``: defaults filled in, the others left out.

    ``faults`` lists what it cannot give.
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
        framed = SIZES & self._constants.keys() if self.frames else ()
        self._framed = {name: wanted[name] for name in framed}
        self._taken = [name for name in wanted if name in source.fields]
        self.faults = []
        for name, spec in wanted.items():
            reads = "the text encoders read" if name in tokens else "the backbone reads"
            if name in source.fields and not source.fields[name].fits(spec):
                self.faults.append(f"{reads} {name} ({spec}), the data has {source.fields[name]}")
            elif name not in source.fields and name not in self._constants:
                none = "none"
                if name in tokens:
                    none = _NO_TEXTS if "latent" in source.made_by else _NO_CAPTIONS
                self.faults.append(f"{reads} {name} ({spec}), the data has {none}")
        if self._known:
            self.faults += self._unknown_tokens(source.null_conditioning())

    def conditioning(self, index: int) -> dict[str, Tensor]:
        given = self.source.conditioning(index) if self._taken else {}
        if faults := self._unknown_tokens(given):
            remedy = "Write the folder anew, with these encoders."
            raise DataError(self.source.describe(index), faults, remedy)
        sizes = {}
        if self._framed:
            sizes = constants(self._framed, {}, self.source.framing(index))
        return {**self._constants, **sizes, **{name: given[name] for name in self._taken}}

    def uncaptioned(self, index: int) -> bool:
        if not self._known:
            return super().uncaptioned(index)
        given, null = self.source.conditioning(index), self.source.null_conditioning()
        named = self._known.keys() & null.keys() & given.keys()
        return bool(named) and all(torch.equal(given[name], null[name]) for name in named)

    def _unknown_tokens(self, given: Mapping[str, Tensor]) -> list[str]:
        """Stored ids that an encoder's table does not have: a GPU would end the run for them."""
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
