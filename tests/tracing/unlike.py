"""Modules that do things which diffusers' do not: (module, what it is called with, its sample)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from tests.tracing.own import WIDTH, Block, Regions

type Case = tuple[nn.Module, dict[str, Any], str]


class Double(nn.Module):
    """Two convolutions."""

    def __init__(self, given: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(given, WIDTH, 3, padding=1), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Attributes(nn.Module):
    """The UNet of textbooks: every part an attribute of its own, and no list."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = Double(3)
        self.down1, self.down2 = Double(WIDTH), Double(WIDTH)
        self.up1, self.up2 = Double(2 * WIDTH), Double(2 * WIDTH)
        self.leave = nn.Conv2d(WIDTH, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        a = self.enter(image)
        b = self.down1(F.max_pool2d(a, 2))
        c = self.down2(F.max_pool2d(b, 2))
        d = self.up1(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        return self.leave(self.up2(torch.cat([F.interpolate(d, scale_factor=2), a], 1)))


class Flat(nn.Module):
    """A list of layers without parts, in a wrapper; its first and last weight are one."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        if tied:
            self.layers[5].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x


class Scan(nn.Module):
    """Repeated use of one block."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.block, self.after = (Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for _ in range(3):
            x = self.block(x)
        return self.after(x)


class Dictionaries(nn.Module):
    """Blocks in a dictionary of dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleDict(
            {side: nn.ModuleDict({at: Block() for at in "xyz"}) for side in ("in", "out")}
        )

    def forward(self, x: Tensor) -> Tensor:
        for side in self.levels.values():
            for block in side.values():
                x = block(x)
        return x


class Pick(nn.Module):
    """Works on the tokens that a mask keeps, however many these are, and puts them back (Mochi)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        places, rows = torch.nonzero(kept.flatten()).flatten(), x.flatten(0, 1)
        return rows.index_put((places,), self.layer(rows[places])).view_as(x)


class Picked(nn.Module):
    """Module with a data-dependent selection."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pick() for _ in range(3))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, kept)
        return x


class Reused(nn.Module):
    """Embeds the times twice, for its blocks and for its end, as DiT does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        x = x + self.embed(times[:, None])
        for layer in self.layers:
            x = F.relu(layer(x))
        return x * self.embed(times[:, None]).exp()


@dataclass
class Answer:
    prediction: Tensor
    loss: float = 0.0


class Answering(nn.Sequential):
    """Returns a dictionary, or a dataclass of its own."""

    def __init__(self, kind: type) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
        self.kind = kind

    def forward(self, *, x: Tensor) -> Any:
        return self.kind(prediction=super().forward(x))


class Tokens(nn.Module):
    """From whole numbers to scores, einsum and torch's own attention between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.attend = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(3)
        )
        self.mix = nn.Parameter(torch.randn(WIDTH, 2, 3))

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        x = self.embed(ids) + self.embed(places)
        for layer in self.attend:
            x = x + layer(x, x, x, need_weights=False)[0]
        return torch.einsum("btc,chk->bhtk", x, self.mix)


class Rotary(nn.Module):
    """Turns by complex numbers that depend on an input, as large as a value that is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        angles = times[:, None, None] * torch.arange(4096.0)[:, None] / torch.arange(1.0, 5)
        turns = torch.polar(torch.ones_like(angles), angles)[:, : x.shape[1]]
        for block in self.blocks:
            pairs = torch.view_as_complex(block(x).unflatten(-1, (-1, 2)))
            x = x + torch.view_as_real(pairs * turns).flatten(-2)
        return x


class Looking(nn.Module):
    """Writes to views that were made in a region of autocast and in one within that."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x).sin()
        with torch.autocast("cpu", torch.bfloat16):
            twice, left = y * 2, y[:, :4]
            with torch.autocast("cpu", enabled=False):
                right = y[:, 4:]
        left.mul_(2.0)
        right[:, 1:].add_(1.0)
        return self.blocks[2](self.blocks[1](y.clone())) + y * 1.5 + twice


class Volume(nn.Module):
    """Convolutions of three dimensions, normed and computed weights; blocks are checkpointed."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(2, WIDTH),
                nn.SiLU(),
                weight_norm(nn.Conv3d(WIDTH, WIDTH, 3, padding=1)),
            )
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def made(module: nn.Module, sample: str, **given: Tensor) -> Case:
    return module, given, sample


def image(module: nn.Module) -> Case:
    return made(module, "x", x=torch.randn(2, WIDTH, 4, 4))


def rows(module: nn.Module) -> Case:
    return made(module, "x", x=torch.randn(3, WIDTH))


def volume(module: nn.Module) -> Case:
    return made(module, "x", x=torch.randn(2, WIDTH, 2, 3, 3))


def tokens() -> Case:
    ids, places = torch.randint(0, 11, (2, 7)), torch.arange(7).expand(2, 7)
    return made(Tokens(), "ids", ids=ids, places=places)


def reused() -> Case:
    return made(Reused(), "x", x=torch.randn(2, WIDTH), times=torch.rand(2))


def regions() -> Case:
    return made(Regions("cuda"), "x", x=torch.randn(2, WIDTH), kept=torch.ones(2, 3))


def picked() -> Case:
    return made(
        Picked(), "x", x=torch.randn(2, 6, WIDTH), kept=torch.tensor([[1, 1, 0, 1, 0, 0]] * 2)
    )


def rotary() -> Case:
    return made(Rotary(), "x", x=torch.randn(2, 6, WIDTH), times=torch.rand(2))


RIGHT: dict[str, tuple[Callable[[], Case], int, int]] = {
    "attributes": (lambda: made(Attributes(), "image", image=torch.randn(2, 3, 8, 8)), 10, 2),
    "flat": (lambda: rows(Flat()), 6, 0),
    "tied": (lambda: rows(Flat(tied=True)), 1, 0),
    "scan": (lambda: image(Scan()), 3, 0),
    "dictionaries": (lambda: image(Dictionaries()), 6, 0),
    "a dictionary": (lambda: rows(Answering(dict)), 2, 0),
    "a dataclass": (lambda: rows(Answering(Answer)), 2, 0),
    "regions of a device that is not here": (regions, 3, 0),
    "picked": (picked, 3, 0),
    "reused": (reused, 3, 0),
    "looking": (lambda: rows(Looking()), 3, 0),
    "tokens": (tokens, 5, 0),
    "rotary": (rotary, 3, 0),
    "volume": (lambda: volume(Volume()), 3, 0),
    "checkpointed": (lambda: volume(Volume(reentrant=False)), 3, 0),
}
"""With how many links and skips there are."""
