"""Forward passes that no trace holds as they are."""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.tracing.own import WIDTH


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class Outside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy())


class Strange(nn.Sequential):
    """Does ``what`` to its input."""

    def __init__(self, what: Callable[[Strange, Tensor], Tensor]) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
        self.what, self.calls = what, 0
        self.lists, self.last = {"calls": [0]}, dict[str, Tensor]()
        self.chance, self.generator = random.Random(0), numpy.random.default_rng(0)
        self.numbers = itertools.count()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self[1](self.what(self, self[0](x)))


def tripled(_: Strange, x: Tensor) -> Tensor:
    return Tripled.apply(x)


def tripled_outside(_: Strange, x: Tensor) -> Tensor:
    return Outside.apply(x)


bound = Tripled.apply


def bound_before(_: Strange, x: Tensor) -> Tensor:
    return bound(x)  # type: ignore[no-any-return, no-untyped-call]


def hooked(_: Strange, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: 2 * gradient)
    return x


def counted(module: Strange, x: Tensor) -> Tensor:
    module.calls += 1
    return x * module.calls


def listed(module: Strange, x: Tensor) -> Tensor:
    module.lists["calls"][0] += 1
    return x * module.lists["calls"][0]


def counting(module: Strange, x: Tensor) -> Tensor:
    return x * module.num_batches_tracked.add_(1)


SEEN = {"calls": 0}


def counted_beside(_: Strange, x: Tensor) -> Tensor:
    SEEN["calls"] += 1
    return x * SEEN["calls"]


def held(module: Strange, x: Tensor) -> Tensor:
    before = module.last.get("x", x)
    module.last["x"] = x.detach()
    return x + before


def cached(module: Strange, x: Tensor) -> Tensor:
    if not hasattr(module, "first"):
        module.first = x.detach() * 2
    return x + module.first


def of_a_gradient(_: Strange, x: Tensor) -> Tensor:
    return x + torch.func.grad(lambda y: y.square().sum())(x)


def drawn(module: Strange, x: Tensor) -> Tensor:
    return x * module.chance.random()


def drawn_by_numpy(module: Strange, x: Tensor) -> Tensor:
    return x * module.generator.random()


def numbered(module: Strange, x: Tensor) -> Tensor:
    return x * next(module.numbers)


def shaken(_: Strange, x: Tensor) -> Tensor:
    return x * random.random()


def shaken_by_numpy(_: Strange, x: Tensor) -> Tensor:
    return x * numpy.random.rand()


def chosen(_: Strange, x: Tensor) -> Tensor:
    return x[x[:, 0] > 0]


def outside(_: Strange, x: Tensor) -> Tensor:
    return x + torch.from_numpy(x.detach().numpy())


@functools.lru_cache
def table(width: int, rows: int) -> Tensor:
    return torch.arange(width).float().sin().expand(rows, width)


def looked_up(_: Strange, x: Tensor) -> Tensor:
    return x + table(x.shape[1], x.shape[0])


def hooked_behind(_: Strange, x: Tensor) -> Tensor:
    x.grad_fn.register_hook(lambda given, _: given)
    return x


def hooked_before(_: Strange, x: Tensor) -> Tensor:
    (x * 2).grad_fn.next_functions[0][0].register_prehook(lambda given: given)
    return x


def packed(_: Strange, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        return x.sin()


def timed(_: Strange, x: Tensor) -> Tensor:
    return x * (time.perf_counter_ns() % 1_000_000_000)


def of_math(_: Strange, x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(x[None], x[None], x[None])[0]


def without_cudnn(_: Strange, x: Tensor) -> Tensor:
    with torch.backends.cudnn.flags(enabled=False):
        return x.sin()


def benched(_: Strange, x: Tensor) -> Tensor:
    torch.backends.mkldnn.enabled = True  # as it is outside of the export, which does without
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark = False
    return x.sin()


def rounded(_: Strange, x: Tensor) -> Tensor:
    torch.set_float32_matmul_precision("medium")
    y = x @ x.t() @ x
    torch.set_float32_matmul_precision("highest")
    return y


def as_outside(_: Strange, x: Tensor) -> Tensor:
    torch.set_float32_matmul_precision("highest")
    with torch.backends.cudnn.flags(enabled=True), torch.backends.mkldnn.flags(enabled=True):
        return x.sin()


def doubled(_: Strange, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    table = torch.linspace(0, 1, WIDTH)
    torch.set_default_dtype(torch.float32)
    return (x * table).float()


def mapped(_: Strange, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row.cumsum(0))(x)


def branched(_: Strange, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (x,))


def by_data(_: Strange, x: Tensor) -> Tensor:
    return x + x.data


def inferred(_: Strange, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = x.sin()
    return x + y.clone()


@torch.inference_mode()
def scaled(x: Tensor) -> Tensor:
    return x.sin()


def inferred_by_decorator(_: Strange, x: Tensor) -> Tensor:
    return x + scaled(x).clone()


def normed_in_a_region(module: Strange, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.batch_norm(x, module.mean, module.mean + 1, training=True).float()


class Slotted(nn.Sequential):
    """Returns a dataclass without a ``__dict__``."""

    @dataclass(slots=True)
    class Result:
        """Output class unknown to torch."""

        sample: Tensor

    def forward(self, x: Tensor) -> Slotted.Result:
        return self.Result(super().forward(x))


class Recurrent(nn.Module):
    """Has dropout of nothing in an LSTM, which draws random numbers by its schema."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lstm(self.blocks[0](x)[:, None])[0][:, 0]
        return self.blocks[1](y)  # type: ignore[no-any-return]
