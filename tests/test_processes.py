"""What a process does at its start."""

from __future__ import annotations

import contextlib
import gc

from megatron_pulse.processes import without_collecting


def test_garbage_is_looked_for_after_imports_and_not_meanwhile() -> None:
    begun: list[str] = []

    def count(phase: str, found: dict[str, int]) -> None:
        begun.append(phase)

    gc.callbacks.append(count)
    try:
        with without_collecting():
            with contextlib.suppress(ImportError), without_collecting():
                raise ImportError
            kept = [[i] for i in range(100_000)]
            assert begun == []
        kept += [[i] for i in range(100_000)]
        assert begun and gc.isenabled()
    finally:
        gc.callbacks.remove(count)
