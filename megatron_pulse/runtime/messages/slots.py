"""Memory that messages of streams are sent from, and arrive in."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class Slots:
    """Buffers that are kept and taken again, for what is sent and received on streams.

    torch marks whatever NCCL sends or receives one by one as used by NCCL's stream: freed, such
    memory is not given out again before the host has seen that stream come so far, and the host is
    a whole step ahead of it. All that a step sends and receives would be held at once (seen on an
    H200: 100 of 100 sends of 16 MB, whether their handles were kept or not). What is never freed
    is not concerned, and its order is that of the device's own stream::

        device's stream   copy into slot    wait for the send    copy into the same slot
        channel's stream                 send .............                           send

    A buffer is asked for when the message before it in the same one has been waited for, so there
    are as many as the plan has messages under way at one time. Between steps there are none.
    """

    def __init__(self) -> None:
        self._free: defaultdict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = (
            defaultdict(list)
        )

    def take(self, like: Tensor, device: torch.device) -> Tensor:
        """A buffer for what is ``like`` that."""
        free = self._free[like.shape, like.dtype, device]
        return free.pop() if free else torch.empty(like.shape, dtype=like.dtype, device=device)

    def give(self, slot: Tensor) -> None:
        """Have a buffer back whose message the device's stream has waited for."""
        self._free[slot.shape, slot.dtype, slot.device].append(slot)

    def clear(self) -> None:
        """Forget all: the streams have come past them, or an error has."""
        self._free.clear()
