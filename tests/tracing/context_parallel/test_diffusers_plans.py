"""Divisions found beside those that diffusers has by hand: numbers and bytes on the links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from diffusers import ContextParallelConfig
from torch import Tensor

from megatron_pulse.tracing.context_parallel.divided_backbone import divide_context, traffic_of
from tests.ranks import run_ranks
from tests.runtime.equality import Case
from tests.tracing.context_parallel.ranks import build_layers, run_layers
from tests.tracing.subject import Subject


def test_outputs_and_bytes_are_those_of_diffusers_plans() -> None:
    names = ("wan", "flux")
    for of_rank in run_ranks(2, _beside_diffusers, names, timeout_s=300):
        assert set(of_rank) == set(names)
        for name, (ours, theirs, predicted, sent) in of_rank.items():
            assert ours == pytest.approx(theirs, abs=1e-6), name
            assert predicted == sent > 0, name


def _beside_diffusers(names: Sequence[str]) -> dict[str, tuple[float, float, float, int]]:
    """Largest differences from one process, by our division and by diffusers' plan; bytes that a
    rank sends by our formula, and that diffusers' rank sends."""
    dist.init_process_group("gloo")
    return {name: _compared(Subject(name, "float32")) for name in names}


@torch.no_grad()
def _compared(subject: Subject) -> tuple[float, float, float, int]:
    group = dist.group.WORLD
    assert group is not None
    rank, size = group.rank(), group.size()
    (batch,) = subject.batches(Case("sequential", 1), 0)
    module: Any = subject.module
    subject.module = lambda **given: module(**given, return_dict=False)
    whole = subject.predict(batch)
    divided = divide_context(subject.chain, rank, size)
    ours = run_layers(divided, build_layers(divided, group), batch, 0)
    sent, exchange, gather = 0, functional.all_to_all_single, functional.all_gather_tensor

    def count_exchange(given: Tensor, *rest: Any) -> Any:
        nonlocal sent
        sent += given.nbytes * (size - 1) // size
        return exchange(given, *rest)

    def count_gather(given: Tensor, *rest: Any, **more: Any) -> Any:
        nonlocal sent
        sent += given.nbytes * (size - 1)
        return gather(given, *rest, **more)

    with (
        patch.object(torch.accelerator, "device_count", lambda: 1),  # of devices; here are CPUs
        patch.object(functional, "all_to_all_single", count_exchange),
        patch.object(functional, "all_gather_tensor", count_gather),
    ):
        module.enable_parallelism(config=ContextParallelConfig(ulysses_degree=size))
        theirs = subject.predict(batch)
    traffic = len(whole) * sum(each.sent_per_rank(size) for each in traffic_of(subject.chain, size))
    return float((ours - whole).abs().max()), float((theirs - whole).abs().max()), traffic, sent
