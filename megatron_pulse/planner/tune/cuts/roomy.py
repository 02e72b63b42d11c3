"""Where a config's chain is cut so that activations have room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import islice, takewhile
from math import inf

from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.partition.find import Goal, PartitionError
from megatron_pulse.planner.partition.moves import descended, farther
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.costs import Unfit, UnfitError
from megatron_pulse.planner.tune.cuts.free import Cuts, what_bears
from megatron_pulse.planner.tune.stages import Stages

SHARES = (1.0, 0.7, 0.4)
"""Of what is in flight at full rate, for which cuts are looked for that leave room."""

MOVES = 200
"""Moved cuts that are looked at, at the most, where activations are computed again, or no cuts that
were found fit."""

STEEP = 16
"""Power of devices' memory whose sum falls while cuts are moved until they fit: as good as the
fullest device's alone, but that others may become emptier in the meantime."""


BESIDE = 0.01
"""Of the shorter of two times that cuts are compared by, what counts beside the longer."""


class ChainOnCluster(Cuts):
    """One backbone's chain on one cluster: the stages and schedule problems of configs.

    Arguments are those of ``Costs``. Where ``stages`` may be given, the default are the config's
    own. Cuts are moved no further once all is to be ``stopped``.
    """

    stopped: Callable[[], bool] = staticmethod(lambda: False)

    @cached_property
    def _stages_of(self) -> Callable[[Config], Stages | UnfitError]:
        return lru_cache(maxsize=4096)(self._make_stages)

    def stages(self, config: Config) -> Stages:
        """The config's own: of its best cuts. Raises UnfitError."""
        bears = what_bears(config)
        found = self._stages_of(bears)
        if config.split and isinstance(found, Stages) and not self.fits(found, split=True):
            found = self._stages_of(replace(bears, split=True))  # what waits holds more than kept
        if isinstance(found, UnfitError):
            raise UnfitError(found.reason, found.detail)
        return found

    def problem(
        self, config: Config, num_microbatches: int, stages: Stages | None = None
    ) -> ScheduleProblem:
        """The schedule to find; its memory is bytes. Raises UnfitError."""
        return self.problem_of(config, num_microbatches, stages or self.stages(config))

    def roomy_cuts(self, config: Config) -> list[Partition]:
        """Cuts that leave room for activations: for all that are in flight at full rate, and, where
        they have a larger load, for a part of these. None where memory binds none of the others."""
        best, goal = self.stages(config), self._goal(config)
        found: list[Partition] = []
        for share in SHARES:
            if self.holds(config, best, share):
                break
            with_room = self._with_room(config, goal, best, share)
            if isinstance(with_room, Partition) and with_room not in found:
                found.append(with_room)
        return found

    def _make_stages(self, config: Config) -> Stages | UnfitError:
        placement, goal = config.placement, self._goal(config)
        found = self._partition_of(self._costs_key(config), placement, goal)
        if isinstance(found, PartitionError):
            return UnfitError(Unfit.PARTITION, f"{config}: {found}")
        free = self.cut(config, found)
        fitting = [free] * self.fits(free, config.split)
        if fitting and not (free.relief.computes and config.recompute.as_needed):
            return free
        why: object = "no cuts that were found leave room for a microbatch on every device"
        for share in SHARES:
            with_room = self._with_room(config, goal, free, share)
            if isinstance(with_room, Partition):
                stages = self.cut(config, with_room)
                fitting += [stages] * self.fits(stages, config.split)
                if config.recompute.as_needed:
                    fitting += self._with_less_beside(config, goal, free, share)
                break
            why = with_room
        if not fitting:
            with suppress(PartitionError):
                rule = self.optimizer_rule(config)
                least = self.cut(config, self._under(rule, self.costs(config), placement, goal))
                fitting += [least] * self.fits(least, config.split)
        if config.recompute.as_needed:
            fitting += self._as_if_all_again(config)
        roomier = [] if fitting else self._roomier(config, goal, free)
        if not (fitting or roomier):
            return UnfitError(Unfit.ACTIVATIONS, f"{config}: {why}")
        fitting = self._moved(config, goal, fitting or roomier)
        return min(fitting, key=partial(self._period_s, config, goal))

    def _as_if_all_again(self, config: Config) -> list[Stages]:
        """The cuts that are best where all is computed again: their loads are even, and as little
        as is needed takes nearly as long on all devices (Flux over 8 V100s, two to a stage: 2.4
        samples/s, then 2.9)."""
        found = []
        for again in (Recompute.ALWAYS, *[Recompute.SELECTIVE] * self.profile.selects):
            with suppress(UnfitError):
                of_all = self.stages(replace(config, recompute=again))
                stages = self.cut(config, of_all.partition)
                found += [stages] * self.fits(stages, config.split)
        return found

    def _roomier(self, config: Config, goal: Goal, free: Stages) -> list[Stages]:
        """Cuts moved until every device has room for a microbatch by its own needs, first those
        that are found as if all needed as little beside as one; none where none come to that."""
        starts = [free.partition]
        found = self._with_room(config, goal, free, 0.0, of=min)
        if isinstance(found, Partition):
            starts.insert(0, found)
        limit = self.cluster.usable_bytes

        def fullness(cuts: Partition) -> float:
            held = self.cut(config, cuts).least_held(config.split)
            return sum((num_bytes / limit) ** STEEP for num_bytes in held)

        for start in starts:
            stages = self.cut(config, start)
            if sum(stages.state_bytes) + sum(stages.saved_bytes) > limit * config.pipeline:
                continue
            moved = farther(start, partial(self.moved_cuts, config), fullness)
            for cuts in takewhile(lambda _: not self.stopped(), islice(moved, MOVES)):
                if self.fits(stages := self.cut(config, cuts), config.split):
                    return [stages]
        return []

    def _period_s(self, config: Config, goal: Goal, stages: Stages) -> float:
        """Seconds of a microbatch on the busiest device, with its messages, or that the memory for
        activations asks for; a little of the shorter, which tells what else is alike apart."""
        load_s = max(goal.evaluate(stages.costs, stages.partition).load_s)
        shorter, longer = sorted((load_s, self.held_s(config, stages)))
        return longer + BESIDE * shorter

    def _moved(self, config: Config, goal: Goal, fitting: Sequence[Stages]) -> list[Stages]:
        """The same with cuts moved as long as that is better, first the soonest: what
        each device computes again is found anew, and as much is in flight."""
        looks = takewhile(lambda _: not self.stopped(), range(MOVES))

        def moved(stages: Stages) -> Stages:
            share = next((share for share in SHARES if self.holds(config, stages, share)), 0.0)

            def seconds(other: Stages) -> float:
                fits = self.fits(other, config.split) and self.holds(config, other, share)
                return self._period_s(config, goal, other) if fits else inf

            return descended(stages, partial(self.moved_stages, config), seconds, looks)

        return [moved(each) for each in sorted(fitting, key=partial(self._period_s, config, goal))]

    def _with_less_beside(
        self, config: Config, goal: Goal, free: Stages, share: float
    ) -> list[Stages]:
        """Cuts as if every device needed as little beside activations as one does, if it is so."""
        found = self._with_room(config, goal, free, share, of=min)
        if not isinstance(found, Partition):
            return []
        stages = self.cut(config, found)
        fits = self.fits(stages, config.split) and self.holds(config, stages, share)
        return [stages] * fits

    def _with_room(
        self,
        config: Config,
        goal: Goal,
        free: Stages,
        share: float,
        of: Callable[[tuple[float, ...]], float] = max,
    ) -> Partition | PartitionError:
        """Cuts that leave room for a share of what is in flight at full rate, or why there are
        none.

        Where activations may be computed again, it is of as few layers (``levels``) as give any
        such cuts; which of them a device then has to is found for it alone (``cut``). Messages and
        what works are taken to need on all devices as much as ``of`` them with ``free`` cuts, and
        these layers.
        """
        placement, levels = config.placement, [self.relief(config)]
        if config.recompute.as_needed:
            levels = self.levels(config)
        low, high = 0, len(levels) - 1
        found: Partition | PartitionError = PartitionError("no cuts leave room for activations")
        while low <= high:
            middle = (low + high) // 2
            costs = self.costs(config, levels[middle])
            beside = self.cut_with(config, free.partition, levels[middle])
            rule = self.rule(config, share, of(beside.transient_bytes(config.split)))
            try:
                found = self._under(rule, costs, placement, goal)
                high = middle - 1
            except PartitionError as error:
                if not isinstance(found, Partition):
                    found = error
                low = middle + 1
        return found
