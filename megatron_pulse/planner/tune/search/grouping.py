"""Groups of alike configs, and their neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from megatron_pulse.planner.layout.layouts import LAYOUTS, Layout
from megatron_pulse.planner.tune.config import Config, Recompute

type LayoutKey = tuple[int, Layout, tuple[int, ...]]

type RankKey = tuple[LayoutKey, int, int, bool]

type SizeKey = tuple[RankKey, int, bool]


def layout_key(config: Config) -> LayoutKey:
    """Group of configs with the same stages: degree, layout, and order of unlike devices."""
    return config.pipeline, config.layout, config.device_order


def rank_key(config: Config) -> RankKey:
    """Group of configs with the same ranks and links."""
    return layout_key(config), config.tensor, config.context, config.pp_before_dp


def size_key(config: Config) -> SizeKey:
    """Group of configs that also share microbatch size and in-flight budget."""
    return rank_key(config), config.micro_batch_size, config.max_in_flight


def by_kind(configs: Iterable[Config]) -> list[list[Config]]:
    """Configs grouped by degree and layout, fewest stages first."""
    kinds: dict[LayoutKey, list[Config]] = {}
    for config in configs:
        kinds.setdefault(layout_key(config), []).append(config)
    return sorted(kinds.values(), key=lambda alike: num_stages(alike[0]))


def neighbours(config: Config) -> Iterator[Config]:
    """Configs that differ in one choice: microbatch size by a factor of two, one option, or the
    transport of skips."""
    for size in (2 * config.micro_batch_size, config.micro_batch_size // 2):
        yield replace(config, micro_batch_size=size)
    yield replace(config, split=not config.split)
    yield replace(config, max_in_flight=not config.max_in_flight)
    for recompute in set(Recompute) - {config.recompute}:
        yield replace(config, recompute=recompute)
    yield replace(config, distributed_optimizer=not config.distributed_optimizer)
    yield replace(config, pp_before_dp=not config.pp_before_dp)
    for layout in LAYOUTS.values():
        if layout != config.layout and (layout.kind, layout.num_chunks) == (
            config.layout.kind,
            config.layout.num_chunks,
        ):
            yield replace(config, layout=layout)


def has_several(config: Config) -> bool:
    """True if each device has several stages, or several pairs of stages."""
    return config.layout.num_chunks > (2 if config.placement.kind.mirrored else 1)


def num_stages(config: Config) -> int:
    """Stages of one pipeline."""
    return config.pipeline * config.layout.num_chunks


def rival_names(config: Config) -> tuple[str, ...]:
    """Names that tell rivals apart: pipeline, tensor and context degree, layout."""
    context = [f"K={config.context}"] * (config.context > 1)
    return f"P={config.pipeline}", f"T={config.tensor}", *context, config.layout.name
