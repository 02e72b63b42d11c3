"""What configs have in common, and those that differ in one thing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from megatron_pulse.planner.layout.layouts import LAYOUTS, Layout
from megatron_pulse.planner.tune.config import Config, Recompute

type Kind = tuple[int, Layout]

type Ranks = tuple[Kind, int, bool]

type Sized = tuple[Ranks, int, bool]


def kind_of(config: Config) -> Kind:
    """What configs have in common that are cut alike."""
    return config.pipeline, config.layout


def ranks_of(config: Config) -> Ranks:
    """What configs have in common whose ranks are as many in the same places."""
    return kind_of(config), config.tensor, config.pipeline_inside


def sized(config: Config) -> Sized:
    """What those have in common whose microbatches are as large too, with ample memory or not."""
    return ranks_of(config), config.micro_batch_size, config.ample


def by_kind(configs: Iterable[Config]) -> list[list[Config]]:
    """Configs of each degree and layout, the fewest stages first."""
    kinds: dict[Kind, list[Config]] = {}
    for config in configs:
        kinds.setdefault(kind_of(config), []).append(config)
    return sorted(kinds.values(), key=lambda alike: num_stages(alike[0]))


def neighbours(config: Config) -> Iterator[Config]:
    """Those that differ in one thing: microbatches twice or half as large, one way to run, or what
    carries skips."""
    for size in (2 * config.micro_batch_size, config.micro_batch_size // 2):
        yield replace(config, micro_batch_size=size)
    yield replace(config, split=not config.split)
    yield replace(config, ample=not config.ample)
    for recompute in set(Recompute) - {config.recompute}:
        yield replace(config, recompute=recompute)
    yield replace(config, distributed_optimizer=not config.distributed_optimizer)
    yield replace(config, pipeline_inside=not config.pipeline_inside)
    for layout in LAYOUTS.values():
        if layout != config.layout and (layout.kind, layout.num_chunks) == (
            config.layout.kind,
            config.layout.num_chunks,
        ):
            yield replace(config, layout=layout)


def has_several(config: Config) -> bool:
    """Whether each device has several stages, or pairs of stages."""
    return config.layout.num_chunks > (2 if config.placement.kind.mirrored else 1)


def num_stages(config: Config) -> int:
    """Of one pipeline."""
    return config.pipeline * config.layout.num_chunks


def names_of(config: Config) -> tuple[str, str, str]:
    """What rivals are told apart by: pipeline and tensor degree, and layout."""
    return f"P={config.pipeline}", f"T={config.tensor}", config.layout.name
