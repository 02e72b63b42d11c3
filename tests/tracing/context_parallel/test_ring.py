"""Ring attention alone, beside the attention of one process."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_pulse.tracing.context_parallel import ring
from megatron_pulse.tracing.context_parallel.division import Division
from megatron_pulse.tracing.context_parallel.ring import ring_attention
from tests.ranks import run_ranks
from tests.tracing.context_parallel.ranks import counted


@dataclass(frozen=True)
class Case:
    """An attention: segments of queries and of keys, kind of mask, and widths."""

    of_query: tuple[int, ...] = (226, 7)
    of_key: tuple[int, ...] = (226, 7)
    mask: str = ""
    key_heads: int = 3
    value_width: int = 8
    dtype: torch.dtype = torch.float64
    scores: int = 1 << 26
    scale: float | None = None


WIDTH, HEADS, SAMPLES = 8, 3, 2
CASES = (
    Case(),
    Case(scores=900),
    Case((9,), (226,), value_width=6, scale=0.3),
    Case((9,), (7, 3), "keys", key_heads=1),
    Case((9,), (7, 4), "rows", scores=1),
    Case((5, 5), (2, 4), "heads"),
    Case(dtype=torch.float32),
    Case((9,), (7, 3), "keys", dtype=torch.float32),
    Case(dtype=torch.bfloat16),
)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def masked(case: Case, generator: torch.Generator) -> Tensor | None:
    """Mask whose first queries or whole blocks of keys are left out."""
    queries, keys = sum(case.of_query), sum(case.of_key)
    if not case.mask:
        return None
    shape = {
        "keys": (SAMPLES, 1, 1, keys),
        "rows": (queries, keys),
        "heads": (1, HEADS, queries, keys),
    }[case.mask]
    mask = torch.rand(shape, generator=generator) > 0.4
    mask[..., : keys // 2] = False  # of all keys of a rank
    mask[..., -1] = True
    return mask


def differences(case: Case, group: Any, device: str = "cpu") -> tuple[list[float], tuple[int, int]]:
    """Relative errors of the result and three gradients, and bytes sent forward and backward."""
    generator = torch.Generator().manual_seed(1)
    queries, keys = sum(case.of_query), sum(case.of_key)
    shapes = (
        (SAMPLES, HEADS, queries, WIDTH),
        (SAMPLES, case.key_heads, keys, WIDTH),
        (SAMPLES, case.key_heads, keys, case.value_width),
        (SAMPLES, HEADS, queries, case.value_width),
    )
    *given, weights = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)
        for shape in shapes
    )
    mask = masked(case, generator)
    whole = [part.double().clone().requires_grad_() for part in given]
    gqa = case.key_heads != HEADS
    wanted = F.scaled_dot_product_attention(*whole, mask, scale=case.scale, enable_gqa=gqa)
    (wanted * weights.double()).sum().backward()
    rank, size = group.rank(), group.size()
    tokens = [Division(2, of).own_tokens(rank, size) for of in (case.of_query, case.of_key)]
    own_tokens = (tokens[0], tokens[1], tokens[1])
    own = [
        part.index_select(2, at).to(device).requires_grad_()
        for part, at in zip(given, own_tokens, strict=True)
    ]
    mask = None if mask is None else mask.to(device)
    ring._SCORES = case.scores
    with counted() as sent:
        segments = case.of_query, case.of_key
        found = ring_attention(own[0], own[1], own[2], mask, segments, case.scale, group)
        forward = sum(sent)
        (found * weights.index_select(2, tokens[0]).to(device)).sum().backward()
    pairs = [(found, wanted, tokens[0])]
    pairs += [(o.grad, w.grad, at) for o, w, at in zip(own, whole, own_tokens, strict=True)]
    errors = []
    for got, expected, at in pairs:
        assert got.dtype == case.dtype
        error = (
            got.cpu().double() - expected.index_select(2, at)
        ).abs().max() / expected.abs().max()
        errors.append(float(error))
    return errors, (forward, sum(sent) - forward)


def compared(device: str) -> list[tuple[list[float], tuple[int, int]]]:
    dist.init_process_group("gloo")
    return [differences(case, own_group(), device) for case in CASES]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_equals_attention_of_one_process_and_sends_what_the_formula_says(size: int) -> None:
    require_equal(size, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_flash_attention_of_blocks_equals_attention_of_one_process() -> None:
    """Ranks share a GPU; widths are those of flash attention in bf16."""
    require_equal(3, "cuda")


def require_equal(size: int, device: str) -> None:
    """Compare results and gradients of every case, and bytes with the formula."""
    every = run_ranks(size, compared, device)
    for number, case in enumerate(CASES):
        found = [of_rank[number] for of_rank in every]
        for errors, _ in found:
            assert max(errors) < TOLERANCES[case.dtype], (case, errors)
        of_key = SAMPLES * case.key_heads * sum(case.of_key) * (WIDTH + case.value_width)
        wanted = (size - 1) * of_key * case.dtype.itemsize
        assert [sum(sent[way] for _, sent in found) for way in (0, 1)] == [wanted, 2 * wanted]


def test_a_query_that_attends_to_nothing_gets_zeros() -> None:
    assert run_ranks(2, attended_to_nothing) == [(0.0, 0.0)] * 2


def attended_to_nothing() -> tuple[float, float]:
    dist.init_process_group("gloo")
    given = torch.randn(1, 3, 2, 4, requires_grad=True)
    mask = torch.zeros(1, 1, 1, 4, dtype=torch.bool)
    found = ring_attention(given, given, given, mask, ((4,), (4,)), None, own_group())
    found.sum().backward()
    assert given.grad is not None
    return float(found.abs().max()), float(given.grad.abs().max())


def test_a_rank_holds_two_blocks_of_keys_and_values() -> None:
    assert run_ranks(4, most_blocks) == [2] * 4


def most_blocks() -> int:
    """Most blocks of others that are in memory at once, with those on their way."""
    dist.init_process_group("gloo")
    alive, most = list[weakref.ref[Any]](), 0
    start = ring._start_shift

    def counting(rows: Tensor, steps: int, *args: Any) -> Callable[[], Tensor]:
        nonlocal most
        finish = start(rows, steps, *args)
        if steps != 1:  # gradients on their way home
            return finish
        most = max(most, 1 + sum(each() is not None for each in alive))

        def finished() -> Tensor:
            memory = finish().numpy().copy()
            alive.append(weakref.ref(memory))
            return torch.from_numpy(memory)

        return finished

    ring._start_shift = counting
    x = torch.randn(1, 3, 5, 4, requires_grad=True)
    ring_attention(x, x, x, None, ((20,), (20,)), None, own_group()).sum().backward()
    assert len(alive) == 2 * 3
    return most


def own_group() -> dist.ProcessGroup:
    assert (group := dist.group.WORLD) is not None
    return group


def alone() -> str:
    """Error of a rank to which nothing comes; empty on the other."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    if dist.get_rank():
        time.sleep(6)
        return ""
    try:
        differences(CASES[0], own_group())
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_wait_that_takes_too_long_names_the_ranks() -> None:
    said = run_ranks(2, alone)[0]
    assert said.startswith("ring attention of the context-parallel ranks [0, 1]")
