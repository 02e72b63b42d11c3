"""Simulation of given orders, compiled with Numba because searches simulate many steps.

A step is a set of numbered items in lines; a line is a device, a copy engine or a channel. The
items of a line run one after another, each as early as its predecessors allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from megatron_pulse.planner.schedule.jit import compiled, compiled_inner, zeros


class Waits(NamedTuple):
    """Predecessors of item i are ``edges[first[i]:first[i + 1]]``, each with its lag."""

    first: Any
    edges: Any
    lags: Any


def earliest_starts(lines: Sequence[Sequence[int]], waits: Waits, duration: Any) -> Any:
    """Earliest start of every item, given the order of each line and ``waits``.

    ``lags`` and ``duration`` are arrays of one type, in one unit. The orders have no circular
    waits.
    """
    return play(*joined(lines), waits, duration)[0]


def completes(lines: Sequence[Sequence[int]], waits: Waits) -> bool:
    """True if the orders, which contain all items, have no circular wait."""
    duration: Any = np.ones(len(waits.first) - 1, dtype=np.int64)
    return bool(play(*joined(lines), waits, duration)[1].all())


def joined(lines: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Items of all lines in one array, and ``line_starts``."""
    return np.array([i for line in lines for i in line], dtype=np.int64), line_starts(lines)


def line_starts(lines: Sequence[Sequence[object]]) -> Any:
    """Position of each line's first item if lines follow each other; the last entry is the end."""
    return np.cumsum([0, *map(len, lines)])


def waits_of(own: Any, edges: Any, num: int, lags: Any = None) -> Waits:
    """Waits of ``num`` items, of which ``own[k]`` follows ``edges[k]`` after ``lags[k]``.

    Without ``lags`` all are 0, as integers.
    """
    own, edges = np.asarray(own, dtype=np.int64), np.asarray(edges, dtype=np.int64)
    lags = np.zeros_like(edges) if lags is None else lags
    order: Any = np.argsort(own, kind="stable")
    first: Any = np.concatenate(([0], np.cumsum(np.bincount(own, minlength=num))))
    return Waits(first, edges[order], lags[order])


def extended(waits: Waits, rows: Sequence[Sequence[tuple[int, float]]]) -> Waits:
    """``waits`` of more items: ``rows`` are the predecessors and lags of each further one."""
    more = np.array([pair for row in rows for pair in row], dtype=np.float64).reshape(-1, 2)
    return Waits(
        np.concatenate((waits.first, waits.first[-1] + line_starts(rows)[1:])),
        np.concatenate((waits.edges, more[:, 0].astype(np.int64))),
        np.concatenate((waits.lags, more[:, 1])),
    )


@compiled
def play(line: Any, firsts: Any, waits: Waits, duration: Any) -> tuple[Any, Any]:
    """Starts of the items, and a mask of those that ended."""
    num_lines, num = len(firsts) - 1, len(duration)
    start: Any = np.zeros_like(duration)
    ended: Any = np.zeros(num, np.bool_)
    position, clock = firsts[:-1].copy(), np.zeros_like(duration)[:1].repeat(num_lines)
    progress = True
    while progress:
        progress = False
        for own in range(num_lines):
            at, now = position[own], clock[own]
            while at < firsts[own + 1]:
                i = line[at]
                begin, free = now, True
                for k in range(waits.first[i], waits.first[i + 1]):
                    j = waits.edges[k]
                    if not ended[j]:
                        free = False
                        break
                    begin = max(begin, start[j] + duration[j] + waits.lags[k])
                if not free:
                    break
                start[i] = begin
                now = begin + duration[i]
                ended[i] = True
                at += 1
                progress = True
            position[own], clock[own] = at, now
    return start, ended


class Messages(NamedTuple):
    """Messages of a step. The operations of a class send alike, each within its microbatch.

    ``number[c, m]`` is the operation of class c on microbatch m (-1: none). It sends to the classes
    ``target[first[c]:first[c + 1]]``, in ``seconds`` each, and waits for ``received[c]`` messages.
    """

    operation_class: Any
    microbatch: Any
    number: Any
    first: Any
    target: Any
    seconds: Any
    received: Any


@compiled
def play_contended(
    devices: int, firsts: Any, waits: Waits, duration: Any, messages: Messages
) -> tuple[Any, Any, Any]:
    """Simulate a step whose devices send one message at a time and receive one at a time.

    Items are numbered line after line, the ``devices`` first. Items of later lines need no device:
    they follow one operation each, in the order of these. Returns starts and ends (NaN: never run),
    and for all messages: source, destination, consumer, seconds, departure, and their order of
    departure.

    An event is the end of an operation, the arrival of a message, or a time at which a device looks
    again. After each event, waiting messages of the freed devices depart, then devices go on.
    Messages are numbered in the order of production. The queue of a channel begins at ``head`` and
    goes on over ``following`` (-1: the end).
    """
    num = len(duration)
    start, end = np.full(num, np.nan), np.full(num, np.nan)
    line, free_at = zeros(num), np.zeros(len(firsts) - 1)
    for own in range(len(firsts) - 1):
        line[firsts[own] : firsts[own + 1]] = own
    next_first, next_items = _successors(waits, num)
    of_class, awaited, num_messages = messages.operation_class, zeros(num), 0
    for i in range(len(of_class)):
        awaited[i] = messages.received[of_class[i]]
        num_messages += messages.first[of_class[i] + 1] - messages.first[of_class[i]]
    position = firsts.copy()
    computing: Any = np.zeros(devices, np.bool_)
    sending: Any = np.zeros(devices, np.bool_)
    receiving: Any = np.zeros(devices, np.bool_)
    head, tail = np.full((devices, devices), -1), np.full((devices, devices), -1)
    following, consumer, order = np.full(num_messages, -1), zeros(num_messages), zeros(num_messages)
    source_of, destination_of = zeros(num_messages), zeros(num_messages)
    seconds, begun = np.zeros(num_messages), np.zeros(num_messages)
    events = [(0.0, d, num + num_messages + d) for d in range(devices)]  # already a heap
    made = sent = 0
    pushed, woken, awake = devices, zeros(devices + 1), 0
    while len(events) > 0:
        now, _, event = heappop(events)
        source = destination = -1
        if event < num:
            source = line[event]
            end[event] = now
            computing[source] = False
            position[source] += 1
            woken[0], awake = source, 1
            for k in range(next_first[event], next_first[event + 1]):
                other, own = next_items[k], line[next_items[k]]
                if own >= devices:
                    start[other] = max(free_at[own], now)
                    free_at[own] = end[other] = start[other] + duration[other]
                elif own != woken[awake - 1] and own != source:  # successors are in order
                    woken[awake] = own
                    awake += 1
            sender = of_class[event]
            for k in range(messages.first[sender], messages.first[sender + 1]):
                to = messages.number[messages.target[k], messages.microbatch[event]]
                if to >= 0:
                    source_of[made], destination_of[made] = source, line[to]
                    consumer[made], seconds[made] = to, messages.seconds[k]
                    if head[source, line[to]] < 0:
                        head[source, line[to]] = made
                    else:
                        following[tail[source, line[to]]] = made
                    tail[source, line[to]] = made
                    made += 1
        elif event < num + num_messages:
            arrived = event - num
            source, destination = source_of[arrived], destination_of[arrived]
            sending[source] = receiving[destination] = False
            awaited[consumer[arrived]] -= 1
            woken[0], awake = destination, 1
        else:
            woken[0], awake = event - num - num_messages, 1
        while True:  # only messages that share the source or destination can begin now
            message = _first(head, sending, receiving, source, destination)
            if message < 0:
                break
            of, to = source_of[message], destination_of[message]
            head[of, to] = following[message]
            sending[of] = receiving[to] = True
            begun[message], order[sent] = now, message
            sent += 1
            heappush(events, (now + seconds[message], pushed, num + message))
            pushed += 1
        for d in woken[:awake]:
            i = position[d]
            if computing[d] or i == firsts[d + 1] or awaited[i] > 0:
                continue
            ready = 0.0
            for k in range(waits.first[i], waits.first[i + 1]):
                ended = end[waits.edges[k]]
                ready = np.inf if np.isnan(ended) else max(ready, ended + waits.lags[k])
            if ready <= now:
                computing[d] = True
                start[i] = now
                heappush(events, (now + duration[i], pushed, i))
                pushed += 1
            elif ready < np.inf:
                heappush(events, (ready, pushed, num + num_messages + d))
                pushed += 1
    known = source_of[:made], destination_of[:made], consumer[:made], seconds[:made], begun[:made]
    return start, end, (*known, order[:sent])


@compiled_inner
def _successors(waits: Waits, num: int) -> tuple[Any, Any]:
    """First successor of each item, and all successors, in ascending order for each item."""
    first, items = zeros(num + 2), zeros(len(waits.edges))
    for j in waits.edges:
        first[j + 2] += 1
    for j in range(num):
        first[j + 2] += first[j + 1]
    for i in range(num):
        for k in range(waits.first[i], waits.first[i + 1]):
            items[first[waits.edges[k] + 1]] = i
            first[waits.edges[k] + 1] += 1
    return first, items


@compiled_inner
def _first(head: Any, sending: Any, receiving: Any, source: int, destination: int) -> int:
    """First waiting message from ``source`` or to ``destination`` that can depart (-1: none)."""
    found = -1
    if source >= 0 and not sending[source]:
        for other in range(len(head)):
            message = head[source, other]
            if message >= 0 and not receiving[other] and (found < 0 or message < found):
                found = message
    if destination >= 0 and not receiving[destination]:
        for other in range(len(head)):
            message = head[other, destination]
            if message >= 0 and not sending[other] and (found < 0 or message < found):
                found = message
    return int(found)
