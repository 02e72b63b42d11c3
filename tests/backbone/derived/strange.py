"""Forward passes that no trace holds as they are."""

from __future__ import annotations

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

    def forward(self, x: Tensor) -> Tensor:
        return self[1](self.what(self, self[0](x)))


def tripled(_: Strange, x: Tensor) -> Tensor:
    return Tripled.apply(x)


def hooked(_: Strange, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: 2 * gradient)
    return x


def counted(module: Strange, x: Tensor) -> Tensor:
    module.calls += 1
    return x * module.calls


def shaken(_: Strange, x: Tensor) -> Tensor:
    return x * random.random()


def shaken_by_numpy(_: Strange, x: Tensor) -> Tensor:
    return x * numpy.random.rand()


def chosen(_: Strange, x: Tensor) -> Tensor:
    return x[x[:, 0] > 0]


def outside(_: Strange, x: Tensor) -> Tensor:
    return x + torch.from_numpy(x.detach().numpy())
