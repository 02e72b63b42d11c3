"""A module's own initialisation, tensor by tensor."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron_pulse.tracing.initial_weights.deferred_init import from_scratch
from megatron_pulse.tracing.initial_weights.meta_init import (
    build_without_memory,
    has_no_memory,
    release_parameter_memory,
)
from megatron_pulse.tracing.initial_weights.op_tape import Tape, TapedCall
from megatron_pulse.tracing.torch_export import DerivationError
from tests.tracing.zoo import ZOO

SEED = 5


def unlike(make: Callable[[], nn.Module]) -> list[str]:
    """Parameters that do not have the bits of eager initialisation, asked for in reverse."""
    torch.manual_seed(SEED)
    wanted = dict(make().named_parameters())
    torch.manual_seed(0)
    found = from_scratch(make).parameters(SEED)
    state = torch.get_rng_state()
    assert list(found) == list(wanted)
    wrong = [n for n, p in reversed(wanted.items()) if not _same(found[n], p.detach())]
    assert torch.equal(torch.get_rng_state(), state)
    return wrong


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


@pytest.mark.parametrize("name", ["small_unet", "hunyuan", "flux", "wan", "mochi", "clip", "t5"])
def test_the_bits_are_those_of_the_class(name: str) -> None:
    assert not unlike(lambda: ZOO[name]()[0])


class Late(nn.Module):
    """Weights that are filled, copied, scaled and replaced after they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 6)
        self.drawn = nn.Parameter(torch.randn(3, 7) / 7**0.5)
        self.norm = nn.LayerNorm(6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.copied = copy.deepcopy(self.blocks[1])
        self.apply(self._reset)
        nn.init.orthogonal_(self.first.weight, gain=2)
        nn.init.trunc_normal_(self.blocks[0].weight, std=0.02)
        with torch.no_grad():
            self.blocks[2].weight.copy_(self.blocks[0].weight.t() * 2)
            self.blocks[2].weight[1:3].uniform_()
            self.blocks[1].weight.mul_(1 / self.blocks[1].weight.norm())
            self.blocks[1].bias[0] = self.drawn.std().item()
        self.copied.weight.data = self.blocks[0].weight.detach().clone()
        self.copied.bias.data = torch.full((6,), 0.25)
        self.table = nn.Parameter(torch.from_numpy(np.linspace(0, 1, 12, dtype="float32")))
        written = torch.zeros(8)
        written.numpy()[2:] = 3
        self.written = nn.Parameter(written)
        self.read = nn.Parameter(torch.tensor(self.first.bias.detach().numpy() + 1))
        self.listed = nn.Parameter(torch.tensor(self.first.weight[0].tolist()))
        self.own = nn.Parameter(torch.empty(40))
        self.own.data.normal_(generator=torch.Generator().manual_seed(11))
        self.qkv = nn.Parameter(torch.cat([nn.Linear(6, 6).weight.detach() for _ in range(3)]))
        self.eye = nn.Parameter(torch.eye(6) if self.first.weight[0, 0] > 0 else torch.ones(6, 6))
        self.strided = nn.Conv2d(4, 20, 3).to(memory_format=torch.channels_last)
        self.half = nn.Linear(17, 3).half()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4))
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.blocks[0].weight
        parameter = nn.Parameter(torch.empty(5))
        self.a = self.b = parameter
        nn.init.normal_(parameter)
        with torch.no_grad():
            self.a.add_(1)
        self.bent = nn.Parameter(torch.randn(33).bernoulli_(0.5) + torch.randperm(33))
        halves = torch.randn(7, 2)
        self.halves, self.some = nn.Parameter(halves), nn.Parameter(halves.flatten()[1:4])
        torch.view_as_complex(halves).mul_(1j)
        self.first.weight.data.view(torch.int32).bitwise_and_(-65536)
        self.last = nn.Linear(5, 3)

    def _reset(self, part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            nn.init.xavier_normal_(part.weight)
            nn.init.zeros_(part.bias)


def test_late_and_odd_ways_to_fill_a_weight() -> None:
    assert not unlike(Late)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("small_unet", {}),
        ("small_unet", {"low_cpu_mem_usage": False}),
        ("small_unet", {"torch_dtype": torch.bfloat16}),
        ("wan", {}),  # of which parts stay in fp32
        ("clip", {}),
        ("t5", {"dtype": torch.bfloat16}),  # with tied weights
    ],
)
@pytest.mark.parametrize("file", ["safetensors", "bin"])
def test_what_from_pretrained_reads_has_the_bits_of_its_files(
    name: str, how: dict[str, Any], file: str, tmp_path: Path
) -> None:
    module = ZOO[name]()[0]
    if file == "bin" and name in ("clip", "t5"):
        torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
        module.config.save_pretrained(tmp_path)
    else:
        module.save_pretrained(tmp_path, safe_serialization=file == "safetensors")
    make = functools.partial(type(module).from_pretrained, tmp_path, **how)
    assert not unlike(make)
    read = dict(make().named_parameters())
    own = dict(module.named_parameters())
    assert all(torch.equal(p, own[n].to(p.dtype)) for n, p in read.items())
    assert all(
        map(
            has_no_memory,
            release_parameter_memory(build_without_memory(make), torch.float32).parameters(),
        )
    )


class Filed(nn.Module):
    """Weights of files in the place of its own, and some that are changed behind that."""

    def __init__(self, folder: Path, how: str) -> None:
        super().__init__()
        with torch.device("meta" if how != "copied" else "cpu"):
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        state = torch.load(folder / "state.pt", mmap=how == "mapped")
        if how == "mapped":
            self.to_empty(device="cpu")
        self.load_state_dict(state, assign=how == "assigned")
        nn.init.normal_(self.last.bias)
        self.last.weight.data *= 2
        assert self.first.weight.to("meta").device.type == "meta"


@pytest.mark.parametrize("how", ["copied", "mapped", "assigned"])
def test_what_is_read_by_hand_has_the_bits_of_its_file(how: str, tmp_path: Path) -> None:
    whole = nn.ModuleDict({"first": nn.Linear(4, 4), "last": nn.Linear(4, 4)})
    torch.save(whole.state_dict(), tmp_path / "state.pt")
    assert not unlike(lambda: Filed(tmp_path, how))


class Moved(nn.Module):
    """Makes its weight anew where that has no values, of the class that it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        weight = self.linear.weight
        assert weight.to("meta").device.type == "meta"
        self.linear.weight = type(weight)(weight.to("meta"), **vars(weight))


def test_a_weight_that_is_moved_to_no_values_is_refused_by_name() -> None:
    with pytest.raises(DerivationError, match=r"linear\.weight"):
        from_scratch(Moved).parameters(SEED)


class Catching(nn.Module):
    """Goes on another way where an operation fails."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        try:
            torch.zeros(2) @ torch.zeros(3)
        except RuntimeError:
            nn.init.zeros_(self.linear.bias)


def test_what_a_module_catches_of_the_recorder_is_raised_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not unlike(Catching)

    def broken(self: Tape, step: TapedCall, writes: object) -> None:
        raise RuntimeError("no more tape")

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            with monkeypatch.context() as patch, contextlib.suppress(RuntimeError):
                patch.setattr(Tape, "add", broken)
                nn.init.zeros_(self.linear.bias)

    with pytest.raises(DerivationError, match="on the meta device: .*no more tape"):
        from_scratch(Broken).parameters(SEED)


class Faulty(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if kind == "unfilled":
            self.table = nn.Parameter(torch.empty(3))
        elif kind == "numpy":
            self.table = nn.Parameter(torch.tensor(np.random.rand(3)))
        elif kind == "python":
            self.linear.weight.data.mul_(random.random())
        elif kind == "buffer":
            self.register_buffer("noise", torch.randn(3))
        elif kind == "computed":
            self.register_buffer("sum", self.linear.weight.detach().sum())
        elif kind == "meta":
            self.absent = nn.Parameter(torch.empty(3, device="meta"))


@pytest.mark.parametrize(
    ("kind", "words"),
    {
        "unfilled": "the parameter table is made by torch.empty and never filled",
        "numpy": "numpy's random numbers do not follow",
        "python": "Python's random numbers do not follow",
        "buffer": "the buffer noise is drawn at random",
        "computed": "the buffer sum is computed from parameters",
        "meta": "absent is left on the meta device, without values: do its files lack it",
    }.items(),
)
def test_what_cannot_be_made_again_is_refused(kind: str, words: str) -> None:
    with pytest.raises(DerivationError, match=words):
        from_scratch(lambda: Faulty(kind)).parameters(SEED)
