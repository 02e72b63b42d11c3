"""Derived chains trained on one, two and four devices, in every way, in one start of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product

import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.runtime.equality import Case, Outcome, differences, merge, plan_of, split, train
from tests.tracing.subject import Subject
from tests.tracing.zoo import kernels_of

MICROBATCHES = 4
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Layout:
    """One way to train a chain.

    With a ``delay``, each weight gradient comes that many backwards after its input gradient.
    ``copied`` embedders run on every device.
    """

    dtype: str
    num_devices: int = 1
    placement: str = "sequential"
    delay: int | None = None
    recompute: bool = False
    copied: bool = False

    def __str__(self) -> str:
        return (
            f"{self.placement} P={self.num_devices} {self.dtype}"
            f"{' whole' if self.delay is None else ' split'}"
            f"{' recomputed' if self.recompute else ''}{' copied' if self.copied else ''}"
        )

    @property
    def reference(self) -> Layout:
        """The same training on one device, whole, nothing recomputed."""
        return Layout(self.dtype)

    def case(self, steps: int) -> Case:
        """As the runtime's tests know it."""
        return Case(
            self.placement, MICROBATCHES, dtype=self.dtype, recompute=self.recompute, steps=steps
        )


def all_layouts(dtypes: Sequence[str], num_ranks: int, folds: bool) -> list[Layout]:
    """Every one on up to ``num_ranks`` devices; folded where there is what ``folds``."""
    return [
        Layout(dtype, num_devices, placement, delay, recompute)
        for dtype, num_devices in product(dtypes, (1, 2, 4))
        if num_devices <= num_ranks
        for placement in (("fold", "sequential") if folds and num_devices > 1 else ("sequential",))
        for delay, recompute in product((None, 1), (False, True))
    ]


@dataclass
class Trained:
    """Result of one layout on all its ranks."""

    layout: Layout
    outcome: Outcome
    reference: Outcome

    @property
    def faults(self) -> list[str]:
        """Every way in which its numbers are not those of one device."""
        got, expected, layout = self.outcome, self.reference, self.layout
        faults = []
        if (got.num_weight_gradients > 0) != (layout.delay is not None):
            faults.append(f"{got.num_weight_gradients} weight gradients were computed apart")
        if not got.losses or got.losses != expected.losses:
            faults.append(f"losses {got.losses} instead of {expected.losses}")
        for what in ("gradients", "parameters"):
            mine, theirs = getattr(got, what), getattr(expected, what)
            if mine.keys() != theirs.keys():
                faults.append(f"{what} of {sorted(mine.keys() ^ theirs.keys())}")
            elif found := differences(mine, theirs):
                worst = max(found, key=found.__getitem__)
                faults.append(
                    f"{len(found)} of {len(theirs)} {what} differ, {worst} most, "
                    f"by {found[worst]:.1e}"
                )
        if layout.placement == "fold" and got.skip_bytes:
            faults.append(f"{got.skip_bytes} bytes of skips were sent")
        return faults


def train_all(
    name: str, layouts: Sequence[Layout], num_ranks: int, steps: int = 3, timeout_s: float = 240.0
) -> tuple[list[Trained], dict[str, list[float]]]:
    """The subject ``name`` in all layouts, and the losses of its module itself by dtype.

    Layouts of one dtype, and of one number of devices in it, follow each other; the reference of
    each is among them. Every rank derives the chains by itself.
    """
    ranks = run_ranks(num_ranks, _derive_and_train, name, layouts, steps, timeout_s=timeout_s)
    merged = {
        layout: merge([outcomes[layout] for outcomes, _ in ranks if layout in outcomes])
        for layout in layouts
    }
    trained = [Trained(layout, merged[layout], merged[layout.reference]) for layout in layouts]
    return trained, ranks[0][1]


def _derive_and_train(
    name: str, layouts: Sequence[Layout], steps: int
) -> tuple[dict[Layout, Outcome], dict[str, list[float]]]:
    torch.set_num_threads(1)
    dtypes = dict.fromkeys(layout.dtype for layout in layouts)
    with kernels_of(name):
        subjects = {dtype: Subject(name, dtype) for dtype in dtypes}
        return _train_here(subjects, layouts, steps)


def _train_here(
    subjects: Mapping[str, Subject], layouts: Sequence[Layout], steps: int
) -> tuple[dict[Layout, Outcome], dict[str, list[float]]]:
    """This rank's part of all: layouts of fewer devices are shared out among the ranks."""
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = {
        (num, first): dist.new_group(list(range(first, first + num)))
        for num in (1, 2, 4)
        for first in range(0, world - num + 1, num)
    }
    outcomes: dict[Layout, Outcome] = {}
    eager: dict[str, list[float]] = {}
    for dtype, of_dtype in groupby(layouts, lambda layout: layout.dtype):
        subject = subjects[dtype]
        for num, same in groupby(of_dtype, lambda layout: layout.num_devices):
            dist.barrier()
            for i, layout in enumerate(same):
                first = i * num % world
                if first <= rank < first + num:
                    outcomes[layout] = _train(subject, layout, steps, groups[num, first])
        if rank == 0:  # last, for it trains the module that layers begin with
            eager[dtype] = subject.eager_losses(Layout(dtype).case(steps))
    dist.barrier()
    return outcomes, eager


def _train(subject: Subject, layout: Layout, steps: int, group: dist.ProcessGroup) -> Outcome:
    case, chain = layout.case(steps), subject.chain
    if layout.delay is not None:
        schedule = plan_of(chain, case, layout.num_devices).step(MICROBATCHES).schedule
        case = replace(case, schedule=split(schedule, layout.delay))
    if layout.copied:
        names = frozenset(layer.name for layer in chain.layers if layer.embedder)
        case = replace(case, replicated=names)
    return train(chain, case, None, group, batches_of=lambda step: subject.batches(case, step))
