"""Small Python objects sent to all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def gather_objects[T](value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Values of all ranks of ``group`` (None: of the job), in rank order (collective).

    The value alone before the job has a process group.
    """
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_from_rank_0[T](find: Callable[[], T]) -> T:
    """Result of ``find`` on rank 0, on all ranks; its ValueError is raised on all (collective)."""
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [find()]
        except ValueError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], ValueError):
        raise answer[0]
    found: T = answer[0]
    return found
