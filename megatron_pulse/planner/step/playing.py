"""The events of ``replay``, one after the other: compiled, for the tuner plays many steps."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from megatron_pulse.planner.schedule.compiled import compiled, part
from megatron_pulse.planner.schedule.operations import Kind

CODES = {kind: code for code, kind in enumerate(Kind)}
"""Kinds as whole numbers."""

_FORWARD, _BACKWARD, _INPUT_GRAD, _WEIGHT_GRAD = (
    CODES[kind] for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
)
_RECOMPUTE, _OFFLOAD, _RELOAD, _FILLER = (
    CODES[kind] for kind in (Kind.RECOMPUTE, Kind.OFFLOAD, Kind.RELOAD, Kind.FILLER)
)


class Table(NamedTuple):
    """Rows of pairs: row r is ``number`` and ``seconds`` from ``first[r]`` to ``first[r + 1]``."""

    first: Any
    number: Any
    seconds: Any

    @classmethod
    def of(cls, rows: Sequence[Sequence[tuple[int, float]]]) -> Table:
        """The same rows."""
        first: Any = np.cumsum([0, *map(len, rows)])
        number = np.array([n for row in rows for n, _ in row], dtype=np.int64)
        seconds = np.array([s for row in rows for _, s in row], dtype=np.float64)
        return cls(first, number, seconds)


class Step(NamedTuple):
    """A step to play: its operations, device after device, those of d from ``first[d]`` on.

    ``number[kind, stage, microbatch]`` is an operation's (-1: there is none), ``home`` the device
    of each stage; ``before`` and ``after`` are the stages beside it in its chain (-1: none).
    ``forward[s]`` are the stages that a forward of s sends to, ``back[s]`` those that a backward
    does, and how long each takes; ``linked[s, t]`` says whether s sends to t. ``received`` and
    ``returned`` count what a forward and a backward of a stage wait for; ``needs`` are what slices
    of fillers wait for, and how long after its end. What leaves a stage for the host, or comes
    back, is ``copying[s]`` on its way.
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
    forward: Table
    back: Table
    linked: Any
    received: Any
    returned: Any
    needs: Table
    copying: Any


class _State(NamedTuple):
    """``position`` is how many operations a device has ended; what has not has no ``end`` (NaN).

    Messages are numbered as they are made; those that wait on a device follow each other from
    ``head`` over ``following`` (-1: the end). ``counts`` are the events and messages so far, and
    the transfers that have begun. ``copied`` is when what an O or L stands for is where it should,
    ``leaving`` and ``coming`` until when devices copy to the host and back.
    """

    start: Any
    end: Any
    awaited: Any
    position: Any
    computing: Any
    sending: Any
    receiving: Any
    sending_s: Any
    head: Any
    tail: Any
    following: Any
    source: Any
    destination: Any
    consumer: Any
    seconds: Any
    order: Any
    begun: Any
    counts: Any
    copied: Any
    leaving: Any
    coming: Any


@compiled
def play_step(step: Step) -> Any:
    """Starts and ends of operations (NaN: never), how many each device has ended, how long it is
    sending; and of all messages source, destination, consumer, seconds and begin, with the order
    in which they began to travel."""
    num, devices, num_messages = len(step.kind), len(step.first) - 1, 0
    for i in range(num):
        if _passes(step.kind[i]):
            sent, stage = _sent(step, step.kind[i]), step.stage[i]
            num_messages += sent.first[stage + 1] - sent.first[stage]
    state = _State(
        np.full(num, np.nan),
        np.full(num, np.nan),
        np.zeros(num, np.int64),
        np.zeros(devices, np.int64),
        np.zeros(devices, np.bool_),
        np.zeros(devices, np.bool_),
        np.zeros(devices, np.bool_),
        np.zeros(devices, np.float64),
        np.full(devices, -1),
        np.full(devices, -1),
        np.full(num_messages, -1),
        np.zeros(num_messages, np.int64),
        np.zeros(num_messages, np.int64),
        np.zeros(num_messages, np.int64),
        np.zeros(num_messages, np.float64),
        np.zeros(num_messages, np.int64),
        np.zeros(num_messages, np.float64),
        np.zeros(3, np.int64),
        np.zeros(num, np.float64),
        np.zeros(devices, np.float64),
        np.zeros(devices, np.float64),
    )
    for i in range(num):
        if step.kind[i] == _FORWARD:
            state.awaited[i] = step.received[step.stage[i]]
        elif _passes(step.kind[i]):
            state.awaited[i] = step.returned[step.stage[i]]
    events = [(0.0, 0, 0)]
    events.pop()
    for device in range(devices):
        _advance(step, state, events, device, 0.0)
    while len(events) > 0:
        now, _, event = heappop(events)
        if event < num:
            _finish(step, state, events, event, now)
        elif event < num + num_messages:
            _arrive(step, state, events, event - num, now)
        else:
            _advance(step, state, events, event - num - num_messages, now)
    found = state.source, state.destination, state.consumer, state.seconds, state.begun, state.order
    return state.start, state.end, state.position, state.sending_s, found


@part
def _passes(kind: int) -> bool:
    return kind == _FORWARD or kind == _BACKWARD or kind == _INPUT_GRAD


@part
def _sent(step: Step, kind: int) -> Table:
    """What operations of a kind that passes send, by their stages."""
    return step.forward if kind == _FORWARD else step.back


@part
def _push(state: _State, events: Any, time: float, event: int) -> None:
    state.counts[0] += 1
    heappush(events, (time, state.counts[0], event))


@part
def _needed(step: Step, i: int) -> tuple[int, int]:
    """The stage whose result an operation takes (-1: none), and the number of what makes it."""
    kind, stage, m = step.kind[i], step.stage[i], step.microbatch[i]
    if kind == _FILLER:
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


@part
def _advance(step: Step, state: _State, events: Any, device: int, now: float) -> None:
    """Start the device's next operation if it is free and the inputs are there."""
    i = step.first[device] + state.position[device]
    if state.computing[device] or i == step.first[device + 1] or state.awaited[i] > 0:
        return
    if step.kind[i] == _FILLER:
        ready = now
        for k in range(step.needs.first[i], step.needs.first[i + 1]):
            end = state.end[step.needs.number[k]]
            if np.isnan(end):
                return
            ready = max(ready, end + step.needs.seconds[k])
        if ready > now:
            _push(state, events, ready, len(step.kind) + len(state.source) + device)
            return
    ready = _there(step, state, i)
    if ready > now:
        _push(state, events, ready, len(step.kind) + len(state.source) + device)
        return
    stage, needed = _needed(step, i)
    if stage >= 0 and (needed < 0 or np.isnan(state.end[needed])):
        own = step.stage[i]
        low, high = min(stage, own), max(stage, own)
        if step.home[stage] == device or not step.linked[low, high]:
            return  # nothing is sent between the two, but the one must have run
    state.computing[device] = True
    state.start[i] = now
    _push(state, events, now + step.duration[i], i)


@part
def _there(step: Step, state: _State, i: int) -> float:
    """When what an O waits for is on the host, or what a backward takes has come back."""
    kind = step.kind[i]
    if kind == _OFFLOAD:
        return float(state.copied[i])
    if kind == _BACKWARD or kind == _INPUT_GRAD:
        back = step.number[_RELOAD, step.stage[i], step.microbatch[i]]
        return float(state.copied[back]) if back >= 0 else 0.0
    return 0.0


@part
def _copy(step: Step, state: _State, i: int, device: int, now: float) -> None:
    """Begin what an operation that ends has copied, behind what is on its way."""
    kind, stage = step.kind[i], step.stage[i]
    if kind == _RELOAD:
        state.coming[device] = max(state.coming[device], now) + step.copying[stage]
        state.copied[i] = state.coming[device]
    elif kind == _FORWARD:
        leaves = step.number[_OFFLOAD, stage, step.microbatch[i]]
        if leaves >= 0:
            state.leaving[device] = max(state.leaving[device], now) + step.copying[stage]
            state.copied[leaves] = state.leaving[device]


@part
def _finish(step: Step, state: _State, events: Any, i: int, now: float) -> None:
    kind, stage = step.kind[i], step.stage[i]
    device: Any = np.searchsorted(step.first, i, side="right") - 1
    state.end[i] = now
    state.computing[device] = False
    state.position[device] += 1
    _copy(step, state, i, device, now)
    if _passes(kind):
        sent = _sent(step, kind)
        for k in range(sent.first[stage], sent.first[stage + 1]):
            message = state.counts[1]
            state.counts[1] += 1
            to = sent.number[k]
            state.source[message] = device
            state.destination[message] = step.home[to]
            state.consumer[message] = step.number[kind, to, step.microbatch[i]]
            state.seconds[message] = sent.seconds[k]
            if state.head[device] < 0:
                state.head[device] = message
            else:
                state.following[state.tail[device]] = message
            state.tail[device] = message
    first, behind = _next(state, device)
    if first >= 0:
        _send(step, state, events, first, behind, now)
    _advance(step, state, events, device, now)
    if kind == _FILLER:
        for other in range(len(state.position)):
            _advance(step, state, events, other, now)
    if _passes(kind):
        beside = step.after[stage] if kind == _FORWARD else step.before[stage]
        if beside >= 0 and step.home[beside] != device:
            _advance(step, state, events, step.home[beside], now)


@part
def _next(state: _State, device: int) -> tuple[int, int]:
    """The first message that waits on the device and can begin, and that before it (-1: none)."""
    behind, message = -1, -1 if state.sending[device] else state.head[device]
    while message >= 0 and state.receiving[state.destination[message]]:
        behind, message = message, state.following[message]
    return message, behind


@part
def _send(step: Step, state: _State, events: Any, message: int, behind: int, now: float) -> None:
    device, seconds = state.source[message], state.seconds[message]
    if behind < 0:
        state.head[device] = state.following[message]
    else:
        state.following[behind] = state.following[message]
    if state.tail[device] == message:
        state.tail[device] = behind
    state.sending[device] = state.receiving[state.destination[message]] = True
    state.sending_s[device] += seconds
    state.begun[message] = now
    state.order[state.counts[2]] = message
    state.counts[2] += 1
    _push(state, events, now + seconds, len(step.kind) + message)


@part
def _arrive(step: Step, state: _State, events: Any, message: int, now: float) -> None:
    state.sending[state.source[message]] = state.receiving[state.destination[message]] = False
    if state.consumer[message] >= 0:
        state.awaited[state.consumer[message]] -= 1
    while True:
        first, before_it = -1, -1
        for device in range(len(state.head)):
            one, behind = _next(state, device)
            if one >= 0 and (first < 0 or one < first):
                first, before_it = one, behind
        if first < 0:
            break
        _send(step, state, events, first, before_it, now)
    _advance(step, state, events, state.destination[message], now)
