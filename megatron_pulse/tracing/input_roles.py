"""Roles of a module's inputs: noisy sample, timestep, conditioning, constants."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megatron_pulse.tracing.input_leaves import leaves_of, name_of, one_name, parents_of
from megatron_pulse.tracing.torch_export import DerivationError

_SAMPLES = ("sample", "hidden_states", "input_ids")
_TIMESTEPS = ("timestep", "timesteps")
_CONSTANTS = ("img_ids", "txt_ids", "image_rotary_emb")
"""Input names of diffusers' and transformers' classes."""

type Make = Callable[[int], Mapping[str, Any]]


@dataclass(frozen=True)
class Inputs:
    """Inputs of a module by the caller's names (``leaves_of``).

    ``sample`` is the noisy sample, ``timestep`` the times (None: there are none). ``constants`` are
    equal for every batch. ``make`` creates all inputs for a microbatch size; ``size`` is the
    example's.
    """

    sample: str
    timestep: str | None
    constants: frozenset[str]
    make: Make
    size: int


def read_inputs(
    module: str,
    given: Mapping[str, Any] | Make,
    sample: str | None,
    timestep: str | None,
    constants: Collection[str],
) -> Inputs:
    """Determine the roles of a module's inputs.

    A mapping is an example. Inputs with as many rows as the sample are repeated for other
    microbatch sizes; the others are equal for every batch. A function creates the inputs for a
    microbatch size. Raises DerivationError with a table of the inputs if a role is unknown.
    """
    example = given(2) if callable(given) else given
    leaves, within = leaves_of(example), parents_of(example)
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
    faults = list(one_name(example))
    found = sample or next((n for n in _SAMPLES if n in tensors), None)
    if found not in tensors:
        what = (
            (f"sample={sample!r} is not one")
            if sample
            else "name the noisy sample with sample=, one"
        )
        faults.append(f"{what} of its inputs:{table(leaves)}")
    times = timestep or next((n for n in _TIMESTEPS if n in leaves), None)
    if times is not None and (times not in tensors or not tensors[times].ndim):
        faults.append(
            f"timestep {times!r} must be a tensor with one time per sample:{table(leaves)}"
        )
    if wrong := [n for n in constants if not any(n in names for names in within.values())]:
        faults.append(f"constants {', '.join(wrong)}: not among its inputs:{table(leaves)}")
    if found in tensors and within[found] & set(constants):
        faults.append(f"{found} is the noisy sample, which cannot be a constant")
    if faults or found is None:
        raise DerivationError(module, faults)
    rows = tensors[found].shape[0]
    known = {*_CONSTANTS, *constants}
    same = frozenset(
        name
        for name, tensor in tensors.items()
        if within[name] & known
        or not callable(given)
        and (not tensor.ndim or tensor.shape[0] != rows)
    )

    def repeated(new: int) -> Mapping[str, Any]:
        def resize(path: Any, leaf: Any) -> Any:
            if name_of(path) in same or not isinstance(leaf, Tensor):
                return leaf
            return torch.cat([leaf] * -(-new // rows))[:new]

        return dict(pytree.tree_map_with_path(resize, dict(example)))

    return Inputs(found, times, same, given if callable(given) else repeated, rows)


def read_others(
    module: str,
    first: Inputs,
    given: Sequence[Mapping[str, Any] | Make],
    sample: str | None,
    timestep: str | None,
    constants: Collection[str],
) -> list[Inputs]:
    """Determine roles of the inputs of other shapes, which must equal those of ``first``.

    Raises DerivationError listing the differences.
    """
    if isinstance(given, Mapping) or callable(given):
        raise DerivationError(module, ["other_inputs must be a list with the inputs of each shape"])
    others = [read_inputs(module, each, sample, timestep, constants) for each in given]
    here = leaves_of(first.make(first.size))
    faults = []
    for i, other in enumerate(others):
        there = leaves_of(other.make(other.size))
        faults += [f"other_inputs[{i}]: {fault}" for fault in _differences(here, there)]
        if other.constants != first.constants and here.keys() == there.keys():
            changed = ", ".join(sorted(other.constants ^ first.constants))
            faults.append(
                f"other_inputs[{i}]: {changed}: the same for every batch there or in inputs, but "
                "not in both. Name it in constants=, or give functions of the microbatch size"
            )
    if faults:
        raise DerivationError(module, faults)
    return others


def _differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[str]:
    """Differences between inputs apart from shapes."""
    if missing := here.keys() - there.keys():
        yield f"{', '.join(sorted(missing))} not given, but among inputs"
    if more := there.keys() - here.keys():
        yield f"{', '.join(sorted(more))} given, but not among inputs"
    for name in sorted(here.keys() & there.keys()):
        kinds = [f"{v.dtype}" if isinstance(v, Tensor) else type(v).__name__ for v in
                 (here[name], there[name])]  # fmt: skip
        if kinds[0] != kinds[1]:
            yield f"{name} is {kinds[1]}, in inputs {kinds[0]}"


def table(leaves: Mapping[str, Any]) -> str:
    """Table of names, shapes and dtypes, one line each."""
    width = max(map(len, leaves), default=0)
    return "".join(
        f"\n  {name:{width}}  "
        + (
            f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
            if isinstance(leaf, Tensor)
            else repr(leaf)
        )
        for name, leaf in leaves.items()
    )
