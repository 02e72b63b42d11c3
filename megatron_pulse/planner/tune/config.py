"""Configurations: one way to run a backbone on a cluster, and the enumeration of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import product

from megatron_pulse.planner.layout.fsdp_layout import FsdpLayout
from megatron_pulse.planner.layout.layouts import FOLD_SOFT, LAYOUTS, WHOLE, Layout
from megatron_pulse.planner.layout.placement import Placement


class Recompute(IntEnum):
    """Policy of a config for activations.

    NEVER: keep all. ALWAYS: full recomputation of every layer. NEEDED: recompute as few layers as
    let a schedule run well (``stages``). HOST: the same, with offload to the host as far as the
    link has time. SELECTIVE: recompute the cheap operations of every layer.
    """

    NEVER = 0
    ALWAYS = 1
    NEEDED = 2
    HOST = 3
    SELECTIVE = 4

    @property
    def as_needed(self) -> bool:
        """True if the layers concerned depend on the partition."""
        return self in (Recompute.NEEDED, Recompute.HOST)


RECOMPUTED = {
    Recompute.ALWAYS: "recompute",
    Recompute.NEEDED: "recompute as needed",
    Recompute.HOST: "host memory",
    Recompute.SELECTIVE: "recompute what is cheap",
}
"""Display name of each policy other than NEVER."""


@dataclass(frozen=True, order=True)
class Config:
    """Degrees, microbatch size in samples, and execution options of one configuration.

    ``split`` defers weight gradients (split backward). ``max_in_flight`` lets a schedule hold as
    many in-flight microbatches as fit, not only as many as 1F1B. With ``pp_before_dp`` neighbours
    in the pipeline are neighbours in a node (Megatron's tp-pp-dp order). Otherwise replicas are
    (tp-dp-pp, its default). ``fsdp`` shards the parameters of one pipeline device. Rank k runs on
    device ``device_order[k]`` of a cluster of unlike devices (empty: device k).
    ``offloads_weights`` keeps all frozen weights in host memory, unlike the profile. ``context``
    ranks share the tokens of a sample.
    """

    pipeline: int
    data: int
    tensor: int
    micro_batch_size: int
    layout: Layout
    split: bool = False
    max_in_flight: bool = False
    recompute: Recompute = Recompute.NEVER
    distributed_optimizer: bool = False
    pp_before_dp: bool = False
    fsdp: FsdpLayout | None = None
    device_order: tuple[int, ...] = ()
    offloads_weights: bool = False
    context: int = 1

    @property
    def replicas(self) -> int:
        """Ranks that hold equal parameters: of all replicas, and those that share tokens."""
        return self.data * self.context

    @property
    def work_of_rank(self) -> tuple[int, int, int]:
        """Microbatch size and the degrees that divide its work: tensor, context."""
        return self.micro_batch_size, self.tensor, self.context

    @property
    def placement(self) -> Placement:
        """Stages of each pipeline device."""
        return self.layout.placement(self.pipeline)

    def num_microbatches(self, global_batch_size: int) -> int:
        """Microbatches of a step on one pipeline."""
        return global_batch_size // (self.data * self.micro_batch_size)

    def __str__(self) -> str:
        degrees = f"P={self.pipeline} D={self.data} T={self.tensor}"
        degrees += f" K={self.context}" * (self.context > 1)
        parts = [f"{degrees} b={self.micro_batch_size}"]
        parts.append(self.layout.name if self.fsdp is None else str(self.fsdp))
        for name in ("split", "max_in_flight"):
            parts += [name] * getattr(self, name)
        if (recompute := RECOMPUTED.get(self.recompute)) is not None:
            parts.append(recompute)
        if self.distributed_optimizer:
            parts.append("distributed optimizer")
        parts += ["weight offload"] * self.offloads_weights
        if self.pipeline > 1 and self.data > 1:
            parts.append("pipeline inside" if self.pp_before_dp else "replicas inside")
        if self.device_order:
            shown = " ".join(map(str, self.device_order))
            parts.append(f"devices {shown:.40}{'...' * (len(shown) > 40)}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Choices:
    """Values that the search may choose from, per field of a config.

    One replica has no optimizer state to divide, so it takes the first of
    ``distributed_optimizer``. With ``pairs``, microbatches have even sizes. ``fsdp`` allows FSDP
    beside pipelines. ``context`` None stands for all degrees that divide a node and that the
    profile's costs of context parallelism allow.
    """

    layouts: tuple[Layout, ...] = tuple(LAYOUTS.values())
    pipeline: tuple[int, ...] | None = None
    tensor: tuple[int, ...] = (1, 2, 4, 8)
    micro_batch_size: tuple[int, ...] | None = None
    split: tuple[bool, ...] = (False, True)
    max_in_flight: tuple[bool, ...] = (False, True)
    recompute: tuple[Recompute, ...] = (Recompute.NEVER, Recompute.NEEDED)
    distributed_optimizer: tuple[bool, ...] = (False, True)
    pairs: bool = False
    fsdp: bool = True
    context: tuple[int, ...] | None = None


def configs(
    num_devices: int,
    devices_per_node: int,
    global_batch_size: int,
    has_skips: bool,
    choices: Choices,
) -> Iterator[Config]:
    """Enumerate the configs that use every device and divide the batch, without duplicates.

    Tensor and context parallelism stay inside a node. Without skips there is one kind of fold. The
    order of ranks does not matter on one node, and is Megatron's default with context parallelism.
    """
    several = num_devices > devices_per_node
    for pipeline, tensor, context in product(
        divisors(num_devices), choices.tensor, choices.context or (1,)
    ):
        shared = tensor * context
        if choices.pipeline is not None and pipeline not in choices.pipeline:
            continue
        if num_devices % (pipeline * shared) or devices_per_node % shared:
            continue
        data = num_devices // (pipeline * shared)
        if global_batch_size % data:
            continue
        reorders = several and pipeline > 1 and data > 1 and context == 1
        for size in _sizes(global_batch_size // data, choices):
            for layout in choices.layouts:
                if (layout == WHOLE) != (pipeline == 1):
                    continue
                if layout == FOLD_SOFT and not has_skips:
                    continue
                for split, max_in_flight, recompute, divided, inside in product(
                    choices.split if pipeline > 1 else (False,),
                    choices.max_in_flight if pipeline > 1 else (False,),
                    choices.recompute,
                    choices.distributed_optimizer[: None if data * context > 1 else 1],
                    (False, True) if reorders else (False,),
                ):
                    yield Config(
                        pipeline,
                        data,
                        tensor,
                        size,
                        layout,
                        split,
                        max_in_flight,
                        recompute,
                        divided,
                        inside,
                        context=context,
                    )


def why_none(
    num_devices: int,
    devices_per_node: int,
    global_batch_size: int,
    has_skips: bool,
    choices: Choices,
) -> str | None:
    """Reason why there are no ``configs``, with the values that would be possible; None if there
    are some."""
    shared = {tensor * context for tensor in choices.tensor for context in choices.context or (1,)}
    degrees = [
        (pipeline, each)
        for pipeline, each in product(divisors(num_devices), sorted(shared))
        if not (num_devices % (pipeline * each) or devices_per_node % each)
    ]
    sharing = f"tensor degree {_listed(choices.tensor)}"
    sharing += f" x context degree {_listed(choices.context)}" if choices.context else ""
    if not degrees:
        both = [t for t in divisors(devices_per_node) if num_devices % t == 0]
        return (
            f"{sharing}: none divides both the {num_devices} devices "
            f"and the {devices_per_node} of a node. Possible: {_listed(both)}"
        )
    able, wanted = {pipeline for pipeline, _ in degrees}, choices.pipeline
    degrees = [each for each in degrees if wanted is None or each[0] in wanted]
    if not degrees:
        return (
            f"pipeline degree {_listed(wanted or ())}: none divides {num_devices} devices with "
            f"{sharing}. Possible: {_listed(able)}"
        )
    layouts = set(choices.layouts) - (set() if has_skips else {FOLD_SOFT})
    names, asked = ", ".join(map(str, choices.layouts)), {pipeline for pipeline, _ in degrees}
    degrees = [
        each for each in degrees if (WHOLE in layouts if each[0] == 1 else layouts - {WHOLE})
    ]
    if not degrees:
        return (
            f"layouts {names}: none is possible with pipeline degree {_listed(asked)}. "
            f"{WHOLE} requires degree 1, all others more"
            f"{'' if has_skips else f', and {FOLD_SOFT} requires a backbone with skips'}"
        )
    shares = {num_devices // (pipeline * each) for pipeline, each in degrees}
    samples = {global_batch_size // data for data in shares if global_batch_size % data == 0}
    if not samples:
        return (
            f"global batch size {global_batch_size}: not a multiple of any possible number of "
            f"replicas ({_listed(shares)})"
        )
    if not any(_sizes(each, choices) for each in samples):
        sizes, even = choices.micro_batch_size, "is even and " * choices.pairs
        return (
            f"microbatch size {_listed(sizes) if sizes else 'of pairs'}: none {even}divides a "
            f"replica's samples ({_listed(samples)}) of global batch size {global_batch_size}"
        )
    return None


def unused(candidates: Iterable[Config], choices: Choices) -> dict[str, list[object]]:
    """Chosen values, by field of ``choices``, that none of ``candidates`` has."""
    known = list(candidates)
    kept: dict[str, set[object]] = {
        "layouts": {config.layout for config in known},
        "pipeline": {config.pipeline for config in known},
        "tensor": {config.tensor for config in known},
        "context": {config.context for config in known},
        "micro_batch_size": {config.micro_batch_size for config in known},
    }
    chosen = {name: getattr(choices, name) for name in kept}
    free = Choices()
    return {
        name: missing
        for name, values in chosen.items()
        if values != getattr(free, name)
        and (missing := [value for value in values or () if value not in kept[name]])
    }


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def divisors(number: int) -> list[int]:
    """Divisors, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def _sizes(samples: int, choices: Choices) -> list[int]:
    """Microbatch sizes that divide a pipeline's samples: the chosen ones, or powers of two."""
    candidates = choices.micro_batch_size or [2**k for k in range(samples.bit_length())]
    unit = 2 if choices.pairs else 1
    return [size for size in candidates if samples % size == 0 and size % unit == 0]
