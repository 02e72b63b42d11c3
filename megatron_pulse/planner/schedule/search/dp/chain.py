"""A job shop as a path that all microbatches follow, for searches by position.

The forwards and (input) gradients of a microbatch form a path of L = 2S positions. Position q is
its q-th operation; a microbatch *at* q has completed q of them. Weight gradients hang on the path.
Without weight gradients time may be reversed: the reversed path takes memory where the other frees
it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from megatron_pulse.planner.schedule.search.jobshop import JobShop


class ChainArrays(NamedTuple):
    """Chain of P devices and M ``microbatches`` in arrays; times in ticks, memory in units.

    ``columns`` is the number of microbatches in flight, plus the next one. ``is_split`` means that
    there are weight gradients.

    By position: ``device``, ``time``, ``lag`` (from the position before), ``weight`` (duration of
    the weight gradient that hangs on it, or 0), ``takes`` and ``gives`` (memory). ``tail[q, m]`` is
    the least time from the end of position q of microbatch m to the end of the step.

    By device and position of a microbatch: ``needs`` is the memory that it is still to take.
    ``holds`` is the memory that it has, and ``share`` the same as a share of the cap. ``life`` is
    the least memory times time, in caps times ticks, that it will use from there on. By device:
    ``load`` of a microbatch's path, ``extra`` of its weight gradients, and ``after``, the least
    time that follows the last operation of the path.
    """

    microbatches: int
    columns: int
    is_split: bool
    device: Any
    time: Any
    lag: Any
    weight: Any
    takes: Any
    gives: Any
    cap: Any
    needs: Any
    holds: Any
    share: Any
    life: Any
    tail: Any
    load: Any
    extra: Any
    after: Any

    @property
    def levels(self) -> int:
        """Number of operations of a step."""
        return int((len(self.time) + (self.weight > 0).sum()) * self.microbatches)


def max_in_flight_microbatches(shop: JobShop) -> int:
    """Largest number of microbatches in flight.

    Each holds the activation of its first stage until its last backward.
    """
    takes, room = shop.most(0), shop.cap[shop.device[0]]
    return min(shop.num_microbatches, room // takes if takes else shop.num_microbatches)


def chain_of(shop: JobShop, mirrored: bool = False) -> ChainArrays:
    """Chain of ``shop``; ``mirrored`` reverses time, for whole backwards alone."""
    count, num = shop.num_microbatches, shop.placement.num_stages
    classes = path_of(shop)
    first = [k * count for k in classes]
    device = [shop.device[i] for i in first]
    time = [shop.duration[i] for i in first]
    lag = [0, *(shop.before[i][0][1] for i in first[1:])]
    weight = [0] * (2 * num)
    if shop.num_classes > 2 * num:
        weight[num:] = [shop.duration[(num + k) * count] for k in classes[num:]]
    if mirrored:
        device, time, lag = device[::-1], time[::-1], [0, *lag[:0:-1]]
    memory = list(map(shop.most, range(num)))
    begin = np.cumsum(lag) + np.concatenate(([0], np.cumsum(time)[:-1]))
    ends = begin + time + weight
    devices = len(shop.cap)
    needs: Any = np.zeros((devices, 2 * num + 1), np.int64)
    holds: Any = np.zeros_like(needs)
    share: Any = np.zeros(needs.shape)
    life: Any = np.zeros(needs.shape)
    for s in range(num):
        d, back = device[s], 2 * num - 1 - s
        part = memory[s] / max(1, shop.cap[d])
        needs[d, : s + 1] += memory[s]
        life[d, : s + 1] += part * (ends[back] - begin[s])
        holds[d, s + 1 : back + 1] += memory[s]
        share[d, s + 1 : back + 1] += part
        life[d, s + 1 : back + 1] += part * (ends[back] - begin[s + 1 : back + 1])
    on = np.array(device) == np.arange(devices)[:, None]
    rest = begin[-1] + time[-1] - begin - time
    return ChainArrays(
        count,
        min(count, max_in_flight_microbatches(shop) + 1),
        any(weight),
        np.array(device, np.int64),
        np.array(time, np.int64),
        np.array(lag, np.int64),
        np.array(weight, np.int64),
        np.array(memory + [0] * num, np.int64),
        np.array([0] * num + memory[::-1], np.int64),
        np.array(shop.cap, np.int64),
        needs,
        holds,
        share,
        life,
        _tails(shop, device, time, lag, weight, memory),
        on @ np.array(time, np.int64),
        on @ np.array(weight, np.int64),
        np.where(on, rest, rest.max()).min(axis=1),
    )


def path_of(shop: JobShop) -> list[int]:
    """Class at every position of the path."""
    num = shop.placement.num_stages
    return [*range(num), *reversed(range(num, 2 * num))]


def _tails(
    shop: JobShop,
    device: list[int],
    time: list[int],
    lag: list[int],
    weight: list[int],
    memory: list[int],
) -> Any:
    """Tails by the rest of the path, later microbatches, and microbatches that wait for freed
    memory."""
    count, length = shop.num_microbatches, len(time)
    tail: Any = np.zeros((length, count), np.int64)
    for m in reversed(range(count)):
        for q in reversed(range(length)):
            least = weight[q]
            if q + 1 < length:
                least = max(least, lag[q + 1] + time[q + 1] + tail[q + 1, m])
            if m + 1 < count:
                least = max(least, time[q] + tail[q, m + 1])
            s = length - 1 - q
            if s < q and memory[s]:
                waits = m + shop.cap[device[q]] // memory[s]
                if waits < count:
                    least = max(least, weight[q] + time[s] + tail[s, waits])
            tail[q, m] = least
    return tail
