"""Communication buffers for messages sent and received on streams."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class BufferPool:
    """Pool of reusable buffers for stream transfers.

    torch marks every tensor that NCCL sends or receives individually as used by NCCL's stream.
    Freed memory of this kind is not reused before the host has seen the stream pass. The host runs
    a whole step ahead of the stream, so a step would hold all its messages at once. Pooled buffers
    are never freed, and their reuse follows the order of the device's stream::

        device's stream   copy into slot    wait for the send    copy into the same slot
        channel's stream                 send .............                           send

    A buffer is reused after the stream waits for its previous message. The pool is therefore as
    large as the plan's maximum number of messages in flight. Between steps the pool is empty.
    """

    def __init__(self) -> None:
        self._free: defaultdict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = (
            defaultdict(list)
        )

    def take(self, like: Tensor, device: torch.device) -> Tensor:
        """Return a buffer with the shape and dtype of ``like``."""
        free = self._free[like.shape, like.dtype, device]
        return free.pop() if free else torch.empty(like.shape, dtype=like.dtype, device=device)

    def give(self, slot: Tensor) -> None:
        """Return a buffer to the pool, after the device's stream waited for its message."""
        self._free[slot.shape, slot.dtype, slot.device].append(slot)

    def clear(self) -> None:
        """Empty the pool, after streams have passed or after an error."""
        self._free.clear()
