"""Original single-file layouts of UNets, SD3, Flux and Wan, read and written.

Their makers and ComfyUI name tensors otherwise than diffusers, and fuse some. diffusers converts in
one direction. Its conversion runs here on markers in place of tensors, which record what becomes of
their rows; the record serves both directions::

    markers by original names --> diffusers' conversion --> to_q = rows 1/3 of qkv, ...
                                                            read: slice    write: concatenate
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from megatron_pulse.backbone.published_weights import Published, PublishedError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_pulse.diffusion.float8 import Float8Tensors

PREFIX = "model.diffusion_model."
"""Beginning of the backbone's names in a file of a whole model."""
_PREFIXES = (PREFIX, "diffusion_model.", "")
UNET, SD3, FLUX = "UNet2DConditionModel", "SD3Transformer2DModel", "FluxTransformer2DModel"
WAN = "WanTransformer3DModel"
SUPPORTED = (UNET, SD3, FLUX, WAN)
"""Classes with an original layout."""


@dataclass(frozen=True)
class RowShare:
    """Share ``index`` of the rows of an original tensor."""

    name: str
    index: int = 0


class Marker:
    """Stand-in for an original tensor, or for rows of several, in diffusers' conversion."""

    shape = (0,)

    def __init__(self, parts: Iterable[RowShare]) -> None:
        self.parts = tuple(parts)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        import torch

        given = kwargs or {}
        if given.get("dim", 0) != 0:
            raise NotImplementedError(f"{function} along another dimension than rows")
        if function is torch.cat:
            return Marker(part for one in args[0] for part in one.parts)
        if function is torch.chunk:
            return args[0].chunk(*args[1:])
        if function is torch.split:
            return args[0].chunk(len(args[1]))
        raise NotImplementedError(f"{function} of an original tensor")

    def chunk(self, count: int, dim: int = 0) -> tuple[Marker, ...]:
        """Shares of a whole tensor's rows."""
        (whole,) = self.parts
        if dim or whole.index:
            raise NotImplementedError("a part of a part")
        return tuple(Marker([RowShare(whole.name, index)]) for index in range(count))


class _Asked(dict[str, Any]):
    """Checkpoint that has every tensor that a conversion takes; ``keys`` are known before."""

    def pop(self, name: str, *default: Any) -> Any:
        return Marker([RowShare(name)])

    def __getitem__(self, name: str) -> Any:
        return Marker([RowShare(name)])


class OriginalLayout:
    """Correspondence between the tensors of a diffusers class and the original ones.

    Raises PublishedError for a class or a configuration without an original layout.
    """

    def __init__(self, published: Published) -> None:
        self._class = published.class_name
        if published.library != "diffusers" or self._class not in SUPPORTED:
            fault = f"original single files are known of {', '.join(SUPPORTED)}"
            raise PublishedError(f"{self._class} has no single-file layout", [fault])
        self._shapes = _shapes(published)
        try:
            markers = _CONVERSIONS[self._class](self._shapes, published.config)
            learned = {name: marker.parts for name, marker in markers.items()}
        except (AttributeError, KeyError, ValueError, TypeError, NotImplementedError) as error:
            raise self._unlike([f"diffusers' conversion: {error!r}"]) from error
        faults = [f"{name} has no original name" for name in self._shapes if name not in learned]
        faults += [f"{name} is of no tensor here" for name in learned if name not in self._shapes]
        if faults:
            raise self._unlike(faults)
        self._parts: dict[str, tuple[RowShare, ...]] = {
            name: learned[name] for name in self._shapes
        }
        self._sources: dict[str, dict[int, tuple[str, int]]] = defaultdict(dict)
        for name, parts in self._parts.items():
            for place, part in enumerate(parts):
                self._sources[part.name][part.index] = name, place

    def _unlike(self, faults: list[str]) -> PublishedError:
        return PublishedError(f"a {self._class} of this configuration has no single file", faults)

    @property
    def prefix(self) -> str:
        """Prefix of the names that are written: as the makers' own files have it."""
        return "" if self._class in (FLUX, WAN) else PREFIX

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by original names, without prefix."""
        found = {}
        for name, sources in self._sources.items():
            rows = [self._rows(theirs) for theirs, _ in sources.values()]
            rest = self._shapes[next(iter(sources.values()))[0]][1:]
            found[name] = (sum(rows), *rest)
        return found

    def _rows(self, name: str) -> int:
        """Rows of a diffusers tensor that are one part."""
        return self._shapes[name][0] // len(self._parts[name])

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Original tensors, by names with prefix, of diffusers' ``tensors``."""
        import torch

        found = {}
        for name, sources in self._sources.items():
            rows = []
            for index in sorted(sources):
                theirs, place = sources[index]
                rows.append(tensors[theirs].split(self._rows(theirs))[place])
            found[self.prefix + name] = rows[0] if len(rows) == 1 else torch.cat(rows)
        return found

    def read(self, stored: Float8Tensors, what: str) -> OriginalTensors:
        """View of the tensors of the file ``what`` by diffusers' names.

        Raises PublishedError that lists every missing, misshapen and unknown tensor of the
        backbone. Tensors of other components are not looked at.
        """
        prefix = next(one for one in _PREFIXES if any(name.startswith(one) for name in stored))
        there = {name.removeprefix(prefix) for name in stored if name.startswith(prefix)}
        wanted = self.shapes()
        faults = [f"{name} is missing" for name in sorted(wanted.keys() - there)]
        faults += [f"{prefix}{name} is unexpected" for name in sorted(there - wanted.keys())]
        for name in wanted.keys() & there:
            if (shape := stored.kind_of(prefix + name)[0]) != wanted[name]:
                faults.append(f"{name} has the shape {list(shape)}, expected {list(wanted[name])}")
        if faults:
            raise PublishedError(f"{what} is not a {self._class} of this configuration", faults)
        return OriginalTensors(self, stored, prefix)

    def rows_of(self, name: str, tensors: Callable[[str], Tensor]) -> Tensor:
        """A diffusers tensor, of the original ``tensors``."""
        import torch

        found = []
        for part in self._parts[name]:
            sources = self._sources[part.name]
            sizes = [self._rows(sources[index][0]) for index in sorted(sources)]
            whole = tensors(part.name)
            found.append(whole if len(sizes) == 1 else whole.split(sizes)[part.index])
        return found[0] if len(found) == 1 else torch.cat(found)

    def sources_of(self, name: str) -> list[str]:
        """Names of the original tensors that hold rows of a diffusers tensor."""
        return list(dict.fromkeys(part.name for part in self._parts[name]))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a diffusers tensor."""
        return self._shapes[name]

    def names(self) -> Iterator[str]:
        """Names of diffusers' tensors."""
        return iter(self._parts)


class OriginalTensors(Mapping[str, "Tensor"]):
    """Tensors of an original file by diffusers' names; each is read on access."""

    def __init__(self, layout: OriginalLayout, stored: Float8Tensors, prefix: str) -> None:
        self._layout, self._stored, self._prefix = layout, stored, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._layout.rows_of(name, lambda theirs: self._stored[self._prefix + theirs])

    def kind_of(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a tensor, from the header alone."""
        theirs = self._prefix + self._layout.sources_of(name)[0]
        return self._layout.shape_of(name), self._stored.kind_of(theirs)[1]

    def as_float8(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Stored float8 values of a tensor and their scale; None if there is no one scale."""
        held = {
            theirs: self._stored.as_float8(self._prefix + theirs)
            for theirs in self._layout.sources_of(name)
        }
        first, *others = held.values()
        if first is None or others:
            return None
        return self._layout.rows_of(name, lambda theirs: first[0]), first[1]

    def __iter__(self) -> Iterator[str]:
        return self._layout.names()

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _shapes(published: Published) -> dict[str, tuple[int, ...]]:
    """Shapes of the class's tensors; raises PublishedError for an invalid configuration."""
    import diffusers
    import torch

    try:
        with torch.device("meta"):
            model = getattr(diffusers, published.class_name).from_config(dict(published.config))
    except Exception as error:  # of many types, for settings that its modules reject
        raise PublishedError(f"diffusers' {published.class_name}", [str(error)]) from error
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if empty := [name for name, shape in found.items() if not prod(shape)]:
        raise PublishedError(
            f"diffusers' {published.class_name}", [f"{one} is empty" for one in empty]
        )
    return found


def _numbers(names: Iterable[str], pattern: str) -> list[int]:
    """Distinct numbers that ``pattern`` finds in names."""
    return sorted({int(found[1]) for name in names if (found := re.match(pattern, name))})


def _convert_sd3(names: Iterable[str], config: Mapping[str, Any]) -> dict[str, Marker]:
    from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers

    names = list(names)
    keys = [f"joint_blocks.{i}." for i in _numbers(names, r"transformer_blocks\.(\d+)\.")]
    keys += [
        f"joint_blocks.{i}.x_block.attn2."
        for i in _numbers(names, r"transformer_blocks\.(\d+)\.attn2\.")
    ]
    keys += ["ln_q"] * any("attn.norm_q" in name for name in names)
    found = convert_sd3_transformer_checkpoint_to_diffusers(_Asked(dict.fromkeys(keys)))
    return dict(found)


def _convert_flux(names: Iterable[str], config: Mapping[str, Any]) -> dict[str, Marker]:
    from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers

    names = list(names)
    keys = [f"double_blocks.{i}." for i in _numbers(names, r"transformer_blocks\.(\d+)\.")]
    keys += [f"single_blocks.{i}." for i in _numbers(names, r"single_transformer_blocks\.(\d+)\.")]
    keys += ["guidance"] * any("guidance_embedder" in name for name in names)
    found = convert_flux_transformer_checkpoint_to_diffusers(_Asked(dict.fromkeys(keys)))
    return dict(found)


_RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "norm2": "out_layers.0",
    "conv2": "out_layers.3", "time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection",
}  # fmt: skip


def _convert_unet(names: Iterable[str], config: Mapping[str, Any]) -> dict[str, Marker]:
    """Conversion of markers by proposed names; the conversion tells what each becomes."""
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    names = list(names)
    proposed = [_ldm_name(name, int(config["layers_per_block"]), names) for name in names]
    markers = {PREFIX + name: Marker([RowShare(name)]) for name in proposed}
    return dict(convert_ldm_unet_checkpoint(markers, config))


def _ldm_name(name: str, num_layers: int, names: list[str]) -> str:
    """Proposed original name of a UNet's tensor."""
    from diffusers.loaders.single_file_utils import DIFFUSERS_TO_LDM_MAPPING

    tables = DIFFUSERS_TO_LDM_MAPPING["unet"]
    known = {**tables["layers"], **tables["class_embed_type"], **tables["addition_embed_type"]}
    known["class_embedding.weight"] = "label_emb.weight"
    if name in known:
        return str(known[name])
    place, _, rest = name.partition(".")
    found = re.fullmatch(
        r"(?:(\d+)\.)?(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)", rest
    )
    if found is None:
        raise ValueError(f"{name} has no original name")
    block, kind, layer, rest = int(found[1] or 0), found[2], int(found[3]), found[4]
    if kind == "resnets":
        module, _, end = rest.partition(".")
        rest = f"{_RESNET[module]}.{end}"
    step = block * (num_layers + 1)
    if place == "mid_block":
        return f"middle_block.{2 * layer + (kind == 'attentions')}.{rest}"
    if kind == "downsamplers":
        return f"input_blocks.{step + num_layers + 1}.0.op.{rest.removeprefix('conv.')}"
    if kind == "upsamplers":
        attends = any(one.startswith(f"{place}.{block}.attentions.") for one in names)
        return f"output_blocks.{step + num_layers}.{1 + attends}.{rest}"
    first = 1 if place == "down_blocks" else 0
    side = "input_blocks" if place == "down_blocks" else "output_blocks"
    return f"{side}.{step + layer + first}.{int(kind == 'attentions')}.{rest}"


_WAN = (
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    ("condition_embedder.time_proj", "time_projection.1"),
    ("condition_embedder.image_embedder.norm1", "img_emb.proj.0"),
    ("condition_embedder.image_embedder.ff.net.0.proj", "img_emb.proj.1"),
    ("condition_embedder.image_embedder.ff.net.2", "img_emb.proj.3"),
    ("condition_embedder.image_embedder.norm2", "img_emb.proj.4"),
    (r"^scale_shift_table", "head.modulation"),
    (r"^proj_out", "head.head"),
    (r"\.scale_shift_table", ".modulation"),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.to_out\.0\.", ".o."),
    (r"\.to_([qkv])\.", r".\1."),
    (r"\.add_([kv])_proj\.", r".\1_img."),
    (r"\.norm_added_k\.", ".norm_k_img."),
    (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
    (r"\.ffn\.net\.2\.", ".ffn.2."),
    (r"\.norm2\.", ".norm3."),
)
"""Patterns of diffusers' names of a Wan transformer, and the original parts of the names."""


def _convert_wan(names: Iterable[str], config: Mapping[str, Any]) -> dict[str, Marker]:
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    proposed = []
    for name in names:
        for pattern, original in _WAN:
            name = re.sub(pattern, original, name)
        proposed.append(name)
    return dict(convert_wan_transformer_to_diffusers({n: Marker([RowShare(n)]) for n in proposed}))


_CONVERSIONS: Mapping[str, Callable[[Iterable[str], Mapping[str, Any]], dict[str, Marker]]] = {
    UNET: _convert_unet,
    SD3: _convert_sd3,
    FLUX: _convert_flux,
    WAN: _convert_wan,
}
