"""Event simulation of one step, compiled with Numba because the tuner simulates many steps."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from megatron_pulse.planner.schedule.jit import compiled, compiled_inner, zeros
from megatron_pulse.planner.schedule.operations import OpType

CODES = {kind: code for code, kind in enumerate(OpType)}
"""Integer code of each operation type."""

_FORWARD, _BACKWARD, _INPUT_GRAD, _WEIGHT_GRAD = (
    CODES[kind] for kind in (OpType.FORWARD, OpType.BACKWARD, OpType.INPUT_GRAD, OpType.WEIGHT_GRAD)
)
_RECOMPUTE, _OFFLOAD, _RELOAD, _BUBBLE_TASK = (
    CODES[kind] for kind in (OpType.RECOMPUTE, OpType.OFFLOAD, OpType.RELOAD, OpType.BUBBLE_TASK)
)


class RaggedTable(NamedTuple):
    """Ragged rows of (number, seconds) pairs: row r is at ``first[r]:first[r + 1]``."""

    first: Any
    number: Any
    seconds: Any

    @classmethod
    def of(cls, rows: Sequence[Sequence[tuple[int, float]]]) -> RaggedTable:
        """Table of ``rows``."""
        first: Any = np.cumsum([0, *map(len, rows)])
        number = np.array([n for row in rows for n, _ in row], dtype=np.int64)
        seconds = np.array([s for row in rows for _, s in row], dtype=np.float64)
        return cls(first, number, seconds)


class StepArrays(NamedTuple):
    """A step to simulate. Operations are numbered device after device, those of d from ``first[d]``
    on.

    ``number[kind, stage, microbatch]`` is an operation's number (-1: none). ``home`` is the device
    of each stage; ``before`` and ``after`` are its neighbours in the chain (-1: none).
    ``forward[s]`` are the stages that a forward of s sends to, with seconds per message;
    ``back[s]`` are those of a backward. ``linked[s, t]`` is true if s sends to t. ``received`` and
    ``returned`` count the messages that a forward and a backward of a stage wait for. ``deps`` are
    the dependencies of bubble tasks' slices, with lags in seconds. ``offload_s[s]`` is the offload
    or reload time of stage s in seconds.
    """

    first: Any
    kind: Any
    stage: Any
    microbatch: Any
    duration: Any
    number: Any
    home: Any
    before: Any
    after: Any
    forward: RaggedTable
    back: RaggedTable
    linked: Any
    received: Any
    returned: Any
    deps: RaggedTable
    offload_s: Any


class _Channels(NamedTuple):
    """Channels between devices, as linked lists.

    Channels from device d begin at ``first_from[d]`` and go on over ``next_from``. Channels to d
    begin at ``first_to[d]`` and go on over ``next_to`` (-1: the end).
    """

    source: Any
    destination: Any
    first_from: Any
    first_to: Any
    next_from: Any
    next_to: Any


@compiled
def play_step(step: StepArrays) -> Any:
    """Simulate ``step``.

    Returns starts and ends of operations (NaN: never run), the number of operations that each
    device completed, and the seconds that each device sends. The last element has, for all
    messages: source, destination, consumer, seconds, departure, and their order of departure.

    An event is the end of an operation, the arrival of a message, or a time at which a device looks
    again. After each event, waiting messages of the freed devices depart, then devices go on.
    Messages are numbered in the order of production. The queue of a channel begins at ``head`` and
    goes on over ``following`` (-1: the end).
    """
    first, kind, stage, home = step.first, step.kind, step.stage, step.home
    num, devices = len(kind), len(first) - 1
    device, awaited, required, copy, num_messages = _prepared(step)
    start, end = np.full(num, np.nan), np.full(num, np.nan)
    position = zeros(devices)
    computing: Any = np.zeros(devices, np.bool_)
    # Channels and their messages
    channels = _channels(step.forward, step.back, home, devices)
    sending: Any = np.zeros(devices, np.bool_)
    receiving: Any = np.zeros(devices, np.bool_)
    sending_s = np.zeros(devices)
    head, tail = np.full(len(channels.source), -1), np.full(len(channels.source), -1)
    following, channel_of = np.full(num_messages, -1), zeros(num_messages)
    consumer, order = zeros(num_messages), zeros(num_messages)
    seconds, begun = np.zeros(num_messages), np.zeros(num_messages)
    # Ends of copies per O and L, and times until which devices copy to and from the host
    copied, leaving, coming = np.zeros(num), np.zeros(devices), np.zeros(devices)
    events = [(0.0, d, num + num_messages + d) for d in range(devices)]  # already a heap
    made = sent = 0
    pushed, woken, awake = devices, zeros(devices + 2), 0
    while len(events) > 0:
        now, _, event = heappop(events)
        source = destination = -1
        if event < num:
            done, own, here = event, stage[event], device[event]
            end[done] = now
            computing[here] = False
            position[here] += 1
            woken[0], awake = here, 1
            if kind[done] == _RELOAD:
                coming[here] = max(coming[here], now) + step.offload_s[own]
                copied[done] = coming[here]
            elif kind[done] == _FORWARD and copy[done] >= 0:
                leaving[here] = max(leaving[here], now) + step.offload_s[own]
                copied[copy[done]] = leaving[here]
            elif kind[done] == _BUBBLE_TASK:
                for other in range(devices):
                    woken[awake] = other
                    awake += 1
            if _passes(kind[done]):
                going = step.forward if kind[done] == _FORWARD else step.back
                for k in range(going.first[own], going.first[own + 1]):
                    to, channel = going.number[k], _channel(channels, here, home[going.number[k]])
                    channel_of[made], seconds[made] = channel, going.seconds[k]
                    consumer[made] = step.number[kind[done], to, step.microbatch[done]]
                    if head[channel] < 0:
                        head[channel] = made
                    else:
                        following[tail[channel]] = made
                    tail[channel] = made
                    made += 1
                source = here
                beside = step.after[own] if kind[done] == _FORWARD else step.before[own]
                if beside >= 0 and home[beside] != here:
                    woken[awake] = home[beside]
                    awake += 1
        elif event < num + num_messages:
            channel = channel_of[event - num]
            source, destination = channels.source[channel], channels.destination[channel]
            sending[source] = receiving[destination] = False
            if consumer[event - num] >= 0:
                awaited[consumer[event - num]] -= 1
            woken[0], awake = destination, 1
        else:
            woken[0], awake = event - num - num_messages, 1
        while True:  # only messages that share the source or destination can begin now
            message = _first(head, sending, receiving, channels, source, destination)
            if message < 0:
                break
            channel = channel_of[message]
            head[channel] = following[message]
            of = channels.source[channel]
            sending[of] = receiving[channels.destination[channel]] = True
            sending_s[of] += seconds[message]
            begun[message], order[sent] = now, message
            sent += 1
            heappush(events, (now + seconds[message], pushed, num + message))
            pushed += 1
        for d in woken[:awake]:
            i = first[d] + position[d]
            if computing[d] or i == first[d + 1] or awaited[i] > 0:
                continue
            ready = 0.0
            if kind[i] == _BUBBLE_TASK:
                ready = _sliced(step.deps, end, i)
            elif kind[i] == _OFFLOAD:
                ready = copied[i]
            elif kind[i] != _FORWARD and copy[i] >= 0:
                ready = np.inf if np.isnan(end[copy[i]]) else copied[copy[i]]
            if now < ready < np.inf:
                heappush(events, (ready, pushed, num + num_messages + d))
                pushed += 1
            elif ready <= now and (required[i] < 0 or not np.isnan(end[required[i]])):
                computing[d] = True
                start[i] = now
                heappush(events, (now + step.duration[i], pushed, i))
                pushed += 1
    among = channels.source[channel_of], channels.destination[channel_of]
    return start, end, position, sending_s, (*among, consumer, seconds, begun, order)


@compiled_inner
def _prepared(step: StepArrays) -> tuple[Any, Any, Any, Any, int]:
    """Device, messages to wait for, required operation, and O or L of each operation; message
    count.

    The required operation must have ended besides the messages (-1: none; the operation's own
    number: it does not exist). A forward has its O, a backward its L (-1: none).
    """
    kind, stage, num = step.kind, step.stage, len(step.kind)
    device, awaited, num_messages = zeros(num), zeros(num), 0
    required, copy = np.full(num, -1), np.full(num, -1)
    for d in range(len(step.first) - 1):
        device[step.first[d] : step.first[d + 1]] = d
    for i in range(num):
        own, m = stage[i], step.microbatch[i]
        of, needed = _needed(step, i)
        if of >= 0:
            if step.home[of] == device[i] or not step.linked[of, own]:
                required[i] = needed if needed >= 0 else i
        if kind[i] == _FORWARD:
            awaited[i] = step.received[own]
            copy[i] = step.number[_OFFLOAD, own, m]
            num_messages += step.forward.first[own + 1] - step.forward.first[own]
        elif _passes(kind[i]):
            awaited[i] = step.returned[own]
            copy[i] = step.number[_RELOAD, own, m]
            num_messages += step.back.first[own + 1] - step.back.first[own]
    return device, awaited, required, copy, num_messages


@compiled_inner
def _passes(kind: int) -> bool:
    return kind == _FORWARD or kind == _BACKWARD or kind == _INPUT_GRAD


@compiled_inner
def _needed(step: StepArrays, i: int) -> tuple[int, int]:
    """Stage whose result operation ``i`` takes, and the operation that produces it (-1: none)."""
    kind, stage, m = step.kind[i], step.stage[i], step.microbatch[i]
    if kind == _BUBBLE_TASK:
        return -1, -1
    if kind == _WEIGHT_GRAD:
        return stage, step.number[_INPUT_GRAD, stage, m]
    if kind == _RECOMPUTE or kind == _OFFLOAD or kind == _RELOAD:
        return stage, step.number[_FORWARD, stage, m]
    other = step.before[stage] if kind == _FORWARD else step.after[stage]
    if other >= 0:
        return other, step.number[kind, other, m]
    if kind == _FORWARD:
        return -1, -1
    return stage, step.number[_FORWARD, stage, m]


@compiled_inner
def _sliced(deps: RaggedTable, end: Any, i: int) -> float:
    """Time at which the dependencies of a bubble task's slice are met; infinite if one has not
    ended."""
    ready = 0.0
    for k in range(deps.first[i], deps.first[i + 1]):
        if np.isnan(end[deps.number[k]]):
            return np.inf
        ready = max(ready, end[deps.number[k]] + deps.seconds[k])
    return ready


@compiled_inner
def _channels(forward: RaggedTable, back: RaggedTable, home: Any, devices: int) -> _Channels:
    most = len(forward.number) + len(back.number)
    channels = _Channels(
        zeros(most),
        zeros(most),
        np.full(devices, -1),
        np.full(devices, -1),
        np.full(most, -1),
        np.full(most, -1),
    )
    count = 0
    for sent in (forward, back):
        for stage in range(len(home)):
            source = home[stage]
            for k in range(sent.first[stage], sent.first[stage + 1]):
                destination = home[sent.number[k]]
                if _channel(channels, source, destination) < 0:
                    channels.source[count], channels.destination[count] = source, destination
                    channels.next_from[count] = channels.first_from[source]
                    channels.next_to[count] = channels.first_to[destination]
                    channels.first_from[source] = channels.first_to[destination] = count
                    count += 1
    return channels


@compiled_inner
def _channel(channels: _Channels, source: int, destination: int) -> int:
    """Number of the channel between two devices (-1: none)."""
    channel = channels.first_from[source]
    while channel >= 0 and channels.destination[channel] != destination:
        channel = channels.next_from[channel]
    return int(channel)


@compiled_inner
def _first(
    head: Any, sending: Any, receiving: Any, channels: _Channels, source: int, destination: int
) -> int:
    """First waiting message from ``source`` or to ``destination`` that can depart (-1: none)."""
    found = -1
    channel = -1 if source < 0 or sending[source] else channels.first_from[source]
    while channel >= 0:
        if head[channel] >= 0 and not receiving[channels.destination[channel]]:
            found = head[channel] if found < 0 else min(found, head[channel])
        channel = channels.next_from[channel]
    channel = -1 if destination < 0 or receiving[destination] else channels.first_to[destination]
    while channel >= 0:
        if head[channel] >= 0 and not sending[channels.source[channel]]:
            found = head[channel] if found < 0 else min(found, head[channel])
        channel = channels.next_to[channel]
    return int(found)
