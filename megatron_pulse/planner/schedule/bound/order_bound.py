"""Lower bound from the best order of one device's operations within its memory.

The other devices are only delays: an operation starts no earlier than its microbatch can arrive,
and ends early enough for what must follow elsewhere. On the last device of a fold, where a
microbatch turns, nothing of a microbatch runs elsewhere between its first and its last operation
there. The number of completed operations of each class then determines what can come next. The
shortest order is found exactly by dynamic programming over these counts. On other devices the time
in between counts as zero, which leaves a bound. With little memory the bound is far above that of
loads alone, and is mostly attained. (Our own derivation.)

A class waits for another class. A state is, for all classes, the number by which a class is
*behind* the one it waits for. Memory in use is a weighted sum of these numbers, so a cap leaves few
states.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_pulse.planner.schedule.bound.microbatch_path import MicrobatchPath
from megatron_pulse.planner.schedule.jit import compiled
from megatron_pulse.planner.schedule.operations import OpType

BOUND_WORK = 2e8
"""Limit of operations tried in all: about two seconds. Most bounds take a thousandth of it."""

TABLE_WORK = 10.0
"""Cost, in tried operations, of building the tables for one state and class."""

CLOSE = 1e-4
"""Relative accuracy of the bound below the shortest possible order."""

_TIGHT = 1 + 1e-9


@dataclass(frozen=True)
class DeviceClasses:
    """The K classes of a device in the order in which they wait for each other.

    ``time[k]`` is a duration. ``head[k, m]`` is the least time from the beginning of the step to
    the start of microbatch m. ``tail[k, m]`` is the least time from its end to the end of the step.
    Class k waits for class ``after[k]`` (-1: none). ``held[k]`` is the memory taken per microbatch
    by which k is behind that class.
    """

    time: Any
    head: Any
    tail: Any
    after: tuple[int, ...]
    held: tuple[float, ...]

    @property
    def busy(self) -> float:
        """Time from the first start to the end of the step if the device is never idle."""
        return float(
            self.head[0, 0] + self.time.sum() * self.head.shape[1] + self.tail[:, -1].min()
        )


def classes_of(path: MicrobatchPath, device: int) -> DeviceClasses:
    """Classes of ``path`` on ``device``, weight gradients last."""
    problem, mine = path.problem, path.on(device)
    count = problem.num_microbatches
    kinds = [path.classes[k] for k in mine]
    time, after = [path.time[k] for k in mine], list(range(-1, len(mine) - 1))
    head, tail = [path.heads[k] for k in mine], [path.tails[k] for k in mine]
    for at, k in enumerate(mine):
        if path.weight[k]:
            kinds.append((OpType.WEIGHT_GRAD, path.classes[k][1]))
            time.append(path.weight[k])
            after.append(at)
            head.append([ready + path.time[k] for ready in path.heads[k]])
            tail.append([(count - 1 - m) * path.weight[k] for m in range(count)])
    held = [0.0] * len(kinds)
    frees = problem.kinds[-1]
    for at, (kind, stage) in enumerate(kinds):
        if kind is OpType.FORWARD:
            k = kinds.index((frees, stage))
            if frees is OpType.WEIGHT_GRAD:
                held[k] += problem.wgrad_bytes_of(stage)
                k = after[k]
            while k != at:
                held[k] += problem.activation_of(stage)
                k = after[k]
    times, heads, tails = (np.array(rows, np.float64) for rows in (time, head, tail))
    return DeviceClasses(times, heads, tails, tuple(after), tuple(held))


def order_bound(
    path: MicrobatchPath, least: float = 0.0, work: float = BOUND_WORK, until: float = math.inf
) -> float:
    """Lower bound on the makespan, the best of all devices; ``least`` is a known bound.

    The search ends after ``work``, or at ``until`` (of ``time.process_time``). Devices with too
    many states are left out.
    """
    cap, devices = path.problem.cap, range(path.problem.placement.num_devices)
    classes = [classes_of(path, device) for device in devices]
    # Busiest device first, which mostly determines the bound.
    for device in sorted(devices, key=lambda d: -classes[d].busy):
        if work <= 0 or time.process_time() >= until:
            break
        room = None if cap is None else cap[device]
        least, spent = shortest_order(classes[device], room, least, work, until)
        work -= spent
    return least


def shortest_order(
    classes: DeviceClasses,
    cap: float | None,
    least: float = 0.0,
    work: float = BOUND_WORK,
    until: float = math.inf,
) -> tuple[float, float]:
    """Makespan of the best order within ``cap``, at most ``CLOSE`` below it; with the work spent.

    Returns ``least`` if that makespan is not above it. Returns a bound if the search takes more
    than ``work`` or lasts longer than ``until``.
    """
    num, count = classes.head.shape
    most = min(250_000, work / (2 * TABLE_WORK * num))
    states = _states(classes, np.inf if cap is None else cap * _TIGHT, count, most)
    if states is None:
        return least, 0.0
    table = _Table.of(states, classes)
    low, high, stride, spent = least, np.inf, 0.0, TABLE_WORK * states.size
    while high > low * (1 + CLOSE) and spent < work and time.process_time() < until:
        length = (low + high) / 2 if high < np.inf else low * (1 + stride)
        stride = 2 * stride or 0.005
        end, reached, late, tried = _earliest(*table, length * _TIGHT)
        spent += tried * num
        if end == 1e300:  # never
            low = max(length, late)
        elif length == least:
            return least, spent
        else:
            high = reached
    return min(low, high), spent


def _states(classes: DeviceClasses, cap: float, count: int, most: float) -> Any:
    """All states that fit ``cap``: int array (states, classes) in lexicographic order.

    An entry is the number by which a class is behind the class it waits for. Returns None if there
    are more than ``most`` states, or if 63 bits cannot number them.
    """
    states: Any = np.zeros((1, 1), np.int64)
    used: Any = np.zeros(1)
    for held in classes.held[1:]:
        room: Any = np.full(len(used), np.inf) if held == 0 else (cap - used) / held
        times: Any = room.clip(0, count).astype(np.int64) + 1
        if times.sum() > most:
            return None
        behind = np.arange(times.sum()) - np.repeat(times.cumsum() - times, times)
        states = np.column_stack((np.repeat(states, times, axis=0), behind))
        used = np.repeat(used, times) + behind * held
    return states if np.log2(states.max(axis=0) + 2).sum() < 63 else None


class _Table(NamedTuple):
    """States and classes for compiled functions.

    ``following[s, k]`` is the state after one more microbatch in class k (-1: not allowed).
    ``ahead[s, k]`` is the number by which class 0 is ahead of class k; the last column is their
    sum. ``work[s]`` is the duration of these operations. States ``first[r]`` to ``first[r + 1]``
    are those that n operations can lead to, where r is n modulo the number of classes. State 0 is
    the beginning.
    """

    following: Any
    ahead: Any
    work: Any
    first: Any
    time: Any
    head: Any
    tail: Any

    @staticmethod
    def of(states: Any, classes: DeviceClasses) -> _Table:
        num = len(classes.after)
        ahead: Any = np.zeros((len(states), num + 1), np.int32)
        for k, waits in enumerate(classes.after[1:], start=1):
            ahead[:, k] = ahead[:, waits] + states[:, k]
        ahead[:, num] = ahead.sum(axis=1)
        rest = -ahead[:, num] % num
        turn = np.argsort(rest, kind="stable")
        place: Any = np.empty(len(turn) + 1, np.int32)
        place[turn], place[-1] = np.arange(len(turn)), -1
        return _Table(
            place[_following(states, classes.after)[turn]],
            ahead[turn],
            ahead[turn, :num] @ classes.time,
            np.concatenate(([0], np.cumsum(np.bincount(rest, minlength=num)))),
            classes.time,
            classes.head,
            classes.tail,
        )


def _following(states: Any, after: tuple[int, ...]) -> Any:
    base = states.max(axis=0) + 2
    weight: Any = np.append(np.cumprod(base[:0:-1])[::-1], 1)
    keys = states @ weight
    following: Any = np.full(states.shape, -1, np.int32)
    for k in range(len(after)):
        step = -weight[k] if k else 0
        step += sum(weight[q] for q, waits in enumerate(after) if waits == k)
        at = np.minimum(np.searchsorted(keys, keys + step), len(keys) - 1)
        there = keys[at] == keys + step
        if k:
            there &= states[:, k] > 0
        following[there, k] = at[there]
    return following


@compiled
def _earliest(
    following: Any,
    ahead: Any,
    work: Any,
    first: Any,
    time: Any,
    head: Any,
    tail: Any,
    length: float,
) -> tuple[float, float, float, int]:
    """Earliest end of all operations if every operation is in time for ``length`` (1e300: never).

    Also returns the makespan of that order, the least makespan implied by an operation that is not
    in time, and the number of states visited.
    """
    num, count = head.shape
    load, last = 0.0, tail[0, count - 1]
    for k in range(num):
        load += time[k]
        last = min(last, tail[k, count - 1])
    now: Any = np.empty(len(following))
    then: Any = np.empty(len(following))
    reached: Any = np.empty(len(following))
    reaches: Any = np.empty(len(following))
    for s in range(len(following)):
        now[s] = 1e300
    late, looked, alive = 1e300, 0, True
    now[0] = reached[0] = 0.0
    for done in range(num * count):
        if not alive:
            return 1e300, 0.0, late, looked
        alive = False
        for s in range(len(following)):
            then[s] = 1e300
        for s in range(first[done % num], first[done % num + 1]):
            begin = now[s]
            if begin == 1e300:
                continue
            looked += 1
            entered = (done + ahead[s, num]) // num
            whole = begin + load * (count - entered) + work[s] + last
            if whole > length:
                late = min(late, whole)
                continue
            for k in range(num):
                to, m = following[s, k], entered - ahead[s, k]
                if to < 0 or m == count:
                    continue
                end = max(begin, head[k, m]) + time[k]
                whole = end + tail[k, m]
                if whole > length:
                    late = min(late, whole)
                elif end < then[to]:
                    alive = True
                    then[to] = end
                    reaches[to] = max(reached[s], whole)
        now, then = then, now
        reached, reaches = reaches, reached
    return now[0], reached[0], late, looked
