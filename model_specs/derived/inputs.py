"""Declarations of a module's inputs by shape."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megatron_pulse.errors import Faults
from model_specs.common.sample_sizes import parse_buckets
from model_specs.derived.rank0_messages import say_once

if TYPE_CHECKING:
    from torch import nn

COMPUTE = "compute"

type Around = Callable[[Any], Callable[..., Any]]
"""Other forward of a module, which it is given."""


@dataclass(frozen=True)
class Input:
    """One input of a module.

    ``path`` is the keyword path (``added_cond_kwargs.time_ids``). ``shape`` is the shape of one
    sample. A dtype "compute" is the run's dtype. ``field`` is the name in a batch, by default the
    module's name. The module takes ``rows`` rows for each sample. An ``appended`` input is none of
    the module's own: it follows the noisy sample's channels (see ``appended_fields``).
    """

    path: str
    shape: tuple[int, ...]
    dtype: str = COMPUTE
    field: str = ""
    rows: int = 1
    appended: bool = False


@dataclass(frozen=True)
class SameInput:
    """Input with the same value for every batch; ``value`` makes it for a number of samples."""

    path: str
    value: Callable[[int], Any]


@dataclass(frozen=True)
class Declared:
    """All inputs of a module.

    ``sample`` is the path of the noisy sample and ``timestep`` the path of the times (see
    ``from_module``). ``num_classes`` and ``null_label`` are those of ``Backbone``. ``around`` gives
    the forward that replaces the module's. It does what the class's pipeline does around a call,
    such as packing latents into tokens. ``channel_axis`` is that of a batch of samples, for
    appended inputs. ``without_dropout`` turns off a dropout that the class's config cannot.
    """

    sample: str
    timestep: str | None
    inputs: tuple[Input | SameInput, ...]
    timestep_scale: float = 1.0
    num_classes: int | None = None
    null_label: int | None = None
    patch_size: int = 1
    output: int | None = None
    around: Around | None = None
    channel_axis: int = 1
    without_dropout: bool = False

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments for ``from_module``."""
        flat = {each.path.replace(".", "_"): each for each in self.inputs}
        return {
            "sample": self.sample,
            "timestep": self.timestep,
            "timestep_scale": self.timestep_scale,
            "constants": [name for name, each in flat.items() if isinstance(each, SameInput)],
            "fields": {
                name: each.field
                for name, each in flat.items()
                if isinstance(each, Input) and each.field
            },
            "output": self.output,
            "num_classes": self.num_classes,
            "null_label": self.null_label,
            "patch_size": self.patch_size,
        }

    def wrap[M: nn.Module](self, module: M) -> M:
        """Prepare ``module`` in place for these inputs, and return it.

        The module's own label dropout is disabled: labels are dropped in the batch if there is a
        ``null_label``.
        """
        for part in module.modules():
            if type(part).__name__ == "LabelEmbedding":
                part.dropout_prob = 0.0
        if self.without_dropout:
            _turn_off_dropout(module)
        if self.around is not None:
            module.forward = self.around(module)
        appended = [i.path for i in self.inputs if isinstance(i, Input) and i.appended]
        if appended:
            module.forward = appending(module.forward, self.sample, appended, self.channel_axis)
        return module

    def make(self, dtype: str) -> Callable[[int], dict[str, Any]]:
        """Factory of example inputs by microbatch size, for the run's ``dtype``."""
        return lambda size: nested((i.path, _value(i, size, dtype)) for i in self.inputs)


def _turn_off_dropout(module: nn.Module) -> None:
    """Set every dropout of ``module`` to 0, and say so."""
    from torch import nn

    parts = [part for part in module.modules() if isinstance(part, nn.Dropout) and part.p]
    if parts:
        most = max(part.p for part in parts)
        say_once(f"{type(module).__name__}: its dropout of {most} is off, as draws need one layout")
    for part in parts:
        part.p = 0.0


def appending(
    forward: Callable[..., Any], sample: str, appended: list[str], axis: int
) -> Callable[..., Any]:
    """``forward`` with inputs ``appended``, which follow ``sample`` along an ``axis``."""
    taken = inspect.signature(forward)

    @functools.wraps(forward)
    def call(**given: Any) -> Any:
        import torch

        parts = [given[sample], *(given.pop(name) for name in appended)]
        return forward(**{**given, sample: torch.cat(parts, dim=axis)})

    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in appended]
    every = sorted([*taken.parameters.values(), *more], key=lambda each: each.kind)
    call.__signature__ = taken.replace(parameters=every)  # type: ignore[attr-defined]
    return call


type Config = SimpleNamespace
"""Settings of a module of a known class."""
type Sizes = SimpleNamespace
"""Sizes chosen by a run: height, width, frames, text_length."""
type Defaults = Mapping[str, int] | Callable[[Config], Mapping[str, int]]


@dataclass(frozen=True)
class Known:
    """A diffusers class with known inputs: its run sizes with defaults, and its declaration."""

    sizes: Defaults
    inputs: Callable[[Config, Sizes], Declared]

    def declared(self, config: Mapping[str, Any], chosen: Mapping[str, int | None]) -> Declared:
        """Inputs of a module with this config; a size of None takes the default."""
        sizes = {name: chosen.get(name) or size for name, size in self.defaults(config).items()}
        return self.inputs(SimpleNamespace(**config), SimpleNamespace(**sizes))

    def sizes_of(
        self, config: Mapping[str, Any], chosen: Mapping[str, Any], buckets: str
    ) -> list[Mapping[str, Any]]:
        """Sizes of each of ``buckets``, written "8x12,12x8" in the order of ``defaults``.

        Sizes after the last given side come from ``chosen``, as do all sizes without buckets.
        Raises ValueError for sizes below 1 (0 where that is the default), for those that patches do
        not divide, for malformed and for repeated buckets.
        """
        defaults = self.defaults(config)
        names = list(defaults)
        chosen = {name: chosen.get(name) for name in names}
        least = {name: min(1, size) for name, size in defaults.items()}
        if faults := [f"{n} is {size}: must be {least[n]} or more" for n, size in chosen.items()
                      if size is not None and size < least[n]]:  # fmt: skip
            raise Faults(faults)
        found: list[Mapping[str, Any]] = [chosen]
        if buckets:
            every = parse_buckets(buckets, names)
            longest = max(map(len, every))
            if twice := [name for name in names[:longest] if chosen.get(name)]:
                raise ValueError(
                    f"buckets={buckets}: give {', '.join(twice)} there or alone, not both"
                )
            found = [{**chosen, **dict(zip(names, one, strict=False))} for one in every]
        if faults := [f for each in found for f in _undivided(each, config.get("patch_size"))]:
            raise Faults(faults)
        return found

    def defaults(self, config: Mapping[str, Any]) -> Mapping[str, int]:
        """Default sizes for a module with this config."""
        return self.sizes(SimpleNamespace(**config)) if callable(self.sizes) else self.sizes


def _undivided(sizes: Mapping[str, Any], patch: Any) -> Iterator[str]:
    """Faults of sizes that are no multiples of the patch: a side, or (frames, height, width)."""
    patches = (1, patch, patch) if isinstance(patch, int) else tuple(patch or ())
    for name, side in zip(("frames", "height", "width"), patches, strict=False):
        if (size := sizes.get(name)) is not None and (over := size % side):
            below = size - over
            nearest = f"{below} or {below + side}" if below else f"{side}"
            yield (
                f"{name} = {size}: patches of {side} do not divide it (in latents). Give "
                f"{name}={nearest}"
            )


def nested(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Nested keywords from (path, value) pairs."""
    found: dict[str, Any] = {}
    for path, value in values:
        *outer, last = path.split(".")
        place = found
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = value
    return found


def _value(given: Input | SameInput, size: int, dtype: str) -> Any:
    import torch

    if isinstance(given, SameInput):
        return given.value(size)
    kind = getattr(torch, dtype if given.dtype == COMPUTE else given.dtype)
    shape = (size * given.rows, *given.shape)
    if kind.is_floating_point:
        return torch.zeros(shape, dtype=kind)
    return torch.ones(shape, dtype=kind)


def cast(inputs: Mapping[str, Any], times: str | None, dtype: Any) -> dict[str, Any]:
    """``inputs`` with fp32 tensors cast to ``dtype``, except the times."""
    import torch
    from torch.utils import _pytree as pytree

    def convert(path: Any, leaf: Any) -> Any:
        name = "_".join(str(getattr(part, "key", getattr(part, "idx", part))) for part in path)
        is_cast = isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 and name != times
        return leaf.to(dtype) if is_cast else leaf

    return dict(pytree.tree_map_with_path(convert, dict(inputs)))
