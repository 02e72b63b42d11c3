"""Backbones without modules: only layers, skips and conditioning, for the planner's tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec

SPEC = TensorSpec((4,))

# Skip edges (source, destination) by cut unit, as measured on the published architectures.
SD_UNET = (
    30,
    [
        *((0, 28), (1, 27), (2, 26), (3, 24), (4, 23), (5, 22)),
        *((6, 20), (7, 19), (8, 18), (9, 16), (10, 15), (11, 14)),
    ],
)
SDXL_UNET = (
    23,
    [(0, 21), (1, 20), (2, 19), (3, 17), (4, 16), (5, 15), (6, 13), (7, 12), (8, 11)],
)
HUNYUAN_DIT = (42, [(i, 41 - i) for i in range(1, 20)])
UVIT_S = (15, [(i, 14 - i) for i in range(1, 7)])
UVIT_L = (23, [(i, 22 - i) for i in range(1, 11)])


def chain(
    num_layers: int,
    skips: Iterable[tuple[int, int]] = (),
    conditioning: Mapping[int, Sequence[int]] | None = None,
) -> Backbone:
    """A chain with these skip edges; ``conditioning[i]`` are the layers that use layer i's."""
    edges = list(skips)
    conditioning = conditioning or {}
    layers = [
        Layer(
            f"layer{i}",
            lambda config: None,
            (SPEC,),
            (SPEC,),
            pushes={f"skip{k}": 0 for k, (a, _) in enumerate(edges) if a == i},
            pops={f"skip{k}": SPEC for k, (_, b) in enumerate(edges) if b == i},
            provides={f"cond{i}": SPEC} if i in conditioning else {},
            uses=tuple(f"cond{j}" for j, users in conditioning.items() if i in users),
        )
        for i in range(num_layers)
    ]
    return Backbone("chain", tuple(layers))
