"""What a process does at its start."""

from __future__ import annotations

import contextlib
import gc
import logging

import pytest

from megatron_pulse.processes import hide_package_warnings, without_collecting


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


def test_what_no_command_uses_is_not_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    hide_package_warnings()
    log, heard = logging.getLogger("bitsandbytes.backends.cpu.ops"), logging.StreamHandler()
    log.addHandler(heard)
    try:
        log.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s", "none")
        log.warning("another")
    finally:
        log.removeHandler(heard)
    assert capsys.readouterr().err == "another\n"
