"""Forward passes that no trace holds as they are."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tests.backbone.derived.own import WIDTH


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class Strange(nn.Sequential):
    """Does ``what`` to its input."""

    def __init__(self, what: Callable[[Strange, Tensor], Tensor]) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
        self.what, self.calls = what, 0
        self.lists, self.last = {"calls": [0]}, dict[str, Tensor]()
        self.chance, self.generator = random.Random(0), numpy.random.default_rng(0)
        self.numbers = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return self[1](self.what(self, self[0](x)))


def tripled(_: Strange, x: Tensor) -> Tensor:
    return Tripled.apply(x)


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


SEEN = {"calls": 0}


def counted_beside(_: Strange, x: Tensor) -> Tensor:
    SEEN["calls"] += 1
    return x * SEEN["calls"]


def held(module: Strange, x: Tensor) -> Tensor:
    before = module.last.get("x", x)
    module.last["x"] = x.detach()
    return x + before


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
