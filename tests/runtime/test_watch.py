"""The watchdog: what it takes for standing still, whom it asks, and whom it blames."""

from __future__ import annotations

import json
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_pulse.planner.layout.routes import Payload
from megatron_pulse.planner.program.device_program import Run, Wait
from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.planner.schedule.operations import Operation, OpType
from megatron_pulse.runtime.watchdog.call_with_timeout import call_with_timeout
from megatron_pulse.runtime.watchdog.diagnosis import RankStatus, diagnose, seconds_until_diagnosis
from megatron_pulse.runtime.watchdog.peer_status import Listener, NoAnswer, ask
from megatron_pulse.runtime.watchdog.progress import Position, Progress

LIMIT_S = 20.0
PROCESSES = {rank: f"process {100 + rank} on node{rank // 2}" for rank in range(8)}
WAITS = RankStatus("step 3, receiving boundary 0", 20.0, True)
WORKS = RankStatus("step 3, in F1:2 (stage 1, microbatch 2)", 21.0, False)
GONE, SILENT = NoAnswer.GONE, NoAnswer.SILENT


@pytest.mark.parametrize(
    "said, blamed, spared",
    [
        ({0: WAITS, 1: SILENT, 2: WAITS}, ["rank 1 (process 101 on node0): no resp"], ["rank 0"]),
        ({0: WAITS, 1: WORKS, 2: GONE}, ["rank 2 (process 102 on node1): process"], ["rank 1:"]),
        ({0: WAITS, 1: WORKS}, ["rank 1: step 3, in F1:2 (stage 1, microbatch 2), for 21 s"], []),
        ({0: WAITS, 1: WAITS}, ["all ranks wait for each other"], ["rank"]),
        ({0: GONE, 1: WAITS, 2: SILENT}, ["rank 0 (", "rank 2 ("], ["rank 1"]),
    ],
)  # fmt: skip
def test_who_keeps_the_others_waiting(
    said: dict[int, RankStatus | NoAnswer], blamed: list[str], spared: list[str]
) -> None:
    diagnosis = diagnose(said, PROCESSES, LIMIT_S)
    blame = diagnosis.reason.partition("; ")[2]
    assert all(text in blame for text in blamed)
    assert not any(text in blame.replace("all ranks wait", "all wait") for text in spared)
    for rank, one in said.items():
        assert isinstance(one, NoAnswer) or any(
            str(rank) in line.partition(":")[0] and one.position in line
            for line in diagnosis.positions
        )


@given(st.lists(st.floats(0, 40), min_size=1, max_size=8))
def test_nobody_is_judged_while_somebody_moves(quiet: list[float]) -> None:
    said: dict[int, RankStatus | NoAnswer] = {
        rank: RankStatus("", stalled_s, True) for rank, stalled_s in enumerate(quiet)
    }
    left_s = seconds_until_diagnosis(said, LIMIT_S)
    assert (left_s is None) == all(stalled_s >= 0.9 * LIMIT_S for stalled_s in quiet)
    assert left_s is None or left_s == LIMIT_S - min(quiet)
    assert seconds_until_diagnosis({**said, 99: SILENT}, LIMIT_S) is None


def test_thousands_of_ranks_take_a_few_lines() -> None:
    said: dict[int, RankStatus | NoAnswer] = {rank: WAITS for rank in range(4096)}
    said[77] = SILENT
    diagnosis = diagnose(said, {}, LIMIT_S)
    assert diagnosis.positions == (
        "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4087 more: step 3, receiving boundary 0, for 20 s",
    )


def test_ranks_answer_those_who_know_the_secret() -> None:
    def echo(question: object) -> dict[str, object]:
        return {"asked": question}

    with (
        socket.create_server(("127.0.0.1", 0)) as deaf,
        socket.create_server(("127.0.0.1", 0)) as s,
    ):
        listener, closed = Listener(echo, "secret"), s.getsockname()[1]
        s.close()
        at = {
            rank: ("127.0.0.1", port)
            for rank, port in enumerate((listener.port, closed, deaf.getsockname()[1]))
        }
        began = time.monotonic()
        said = ask(at, "secret", {"ask": 3}, 0.5)
        assert said == {0: {"asked": {"ask": 3}}, 1: GONE, 2: SILENT}
        assert time.monotonic() - began < 100  # and not for ever, on a busy machine too
        assert ask({0: at[0]}, "Secret", {"ask": 3}, 0.5) == {0: SILENT}
        for garbage in (b"", b"\n", b"[1]\n", b"\xff\n", b"x" * 100_000, b'{"secret": 1}\n'):
            with socket.create_connection(at[0], 5) as stranger:
                stranger.settimeout(5)
                try:
                    stranger.sendall(garbage)
                    stranger.shutdown(socket.SHUT_WR)
                    assert stranger.recv(1) == b""
                except OSError:  # it has heard enough: reset, or no longer connected
                    pass
        assert ask({0: at[0]}, "secret", {}, 0.5) == {0: {"asked": {}}}
        listener.close()


def test_what_blocks_is_left_behind() -> None:
    never = threading.Event()
    began = time.monotonic()
    assert call_with_timeout(0.1, never.wait, "nothing") == "nothing"
    assert time.monotonic() - began < 5
    assert call_with_timeout(5, lambda: 7, 0) == 7 and call_with_timeout(5, lambda: 1 // 0, 0) == 0


def seen_while(main: Callable[[], object], place: Progress) -> list[tuple[int, Position]]:
    """Two observations of the main thread in ``main`` by another thread, repeated if late."""
    for _ in range(20):
        found: list[tuple[int, Position]] = []
        ended = threading.Event()

        def look(found: Any = found, ended: Any = ended) -> None:
            for _ in range(2):
                time.sleep(0.1)
                seen = place.signature(), place.position()
                if not ended.is_set():
                    found.append(seen)

        thread = threading.Thread(target=look)
        thread.start()
        main()
        ended.set()
        thread.join()
        if len(found) == 2:
            return found
    raise AssertionError("twenty times the other thread was late")


def test_where_the_main_thread_is() -> None:
    place = Progress()
    (first, sight), (second, _) = seen_while(lambda: time.sleep(0.5), place)
    assert first == second and not sight.waits
    assert sight.text.startswith("starting, at ") and "time.sleep(0.5)" in sight.text
    with place.during("saving step 7", patient=True):
        waiting: queue.Queue[int] = queue.Queue()

        def wait() -> None:
            threading.Timer(0.5, waiting.put, [1]).start()
            waiting.get()

        (third, sight), _ = seen_while(wait, place)
        assert third != first and sight.text.startswith("saving step 7, at ")
        place.device, place.ranks = 1, (4, 6)
        message = Message(
            Operation(OpType.FORWARD, 0, 2),
            Operation(OpType.FORWARD, 1, 2),
            Payload.BOUNDARY,
            "0",
            0,
            1,
        )
        place.event = Wait(message)
        assert place.position().text == (
            "saving step 7, receiving boundary 0 (F0:2 to F1:2; operation F1:2, stage 1, "
            "microbatch 2) from pipeline device 0 (rank 4)"
        )
        place.event = Run(Operation(OpType.BACKWARD, 3, 1))
        assert place.position().text == "saving step 7, in B3:1 (stage 3, microbatch 1)"
    assert place.phase.name == "starting"


WATCHED = """
import sys, time
from pathlib import Path
from megatron_pulse.runtime.watchdog.progress import PROGRESS
from megatron_pulse.runtime.watchdog.watchdog import Watchdog
folder = Path(sys.argv[1])
def word(text, is_first):
    (folder / "word").write_text(f"{is_first} {text}")
Watchdog(0, 1.0, folder / "failures" / "stacks0.txt", word).start()
began = time.monotonic()
while time.monotonic() < began + 2:  # it computes, while nothing else is to be done
    pass
for _ in range(8):
    time.sleep(0.25)
    PROGRESS.moves += 1
with PROGRESS.during("solving", grants_s=60):
    time.sleep(2)
print("stands still", flush=True)
with PROGRESS.during("step 4"):
    time.sleep(60)
"""


def test_a_process_that_stands_still_is_ended_and_says_where(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WATCHED, str(tmp_path)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert run.returncode == 1 and run.stdout == "stands still\n"
    reason = "no progress for 1 s (--pulse-timeout-s); rank 0: step 4, at "
    assert reason in run.stderr and "Traceback" not in run.stderr
    assert (tmp_path / "word").read_text().startswith(f"True {reason}")
    stacks = (tmp_path / "failures" / "stacks0.txt").read_text()
    assert "this rank: step 4" in stacks and 'File "<string>"' in stacks


def test_what_is_said_is_a_line_of_json() -> None:
    """However long a place is: it may not cut the line in two."""
    listener = Listener(lambda question: {"words": "x" * 30_000}, "s")
    answer = ask({0: ("127.0.0.1", listener.port)}, "s", {}, 5)[0]
    assert not isinstance(answer, NoAnswer) and json.dumps(answer) == json.dumps(
        {"words": "x" * 30_000}
    )
    listener.close()
