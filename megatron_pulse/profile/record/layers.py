"""A layer, a skip and a conditioning edge, whatever the microbatch size."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ShardSums:
    """What tensor-parallel ranks sum, bytes per sample of each tensor.

    A forward sums the outputs of row-parallel linears (``rows``), a backward the gradients of what
    column-parallel ones take: ``columns`` of tokens, which sequence parallelism divides, and
    ``contexts``, which are whole on every rank. Recomputation ends with the last tensor that the
    backward wants: it repeats the first ``repeated_rows`` sums of a forward (None: all, in older
    profiles).
    """

    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    repeated_rows: int | None = None


@dataclass(frozen=True)
class ProfiledLayer:
    """What does not depend on the microbatch size; ``boundary_bytes`` are those of all boundary
    tensors that the layer takes, together, per sample.

    Tensor parallelism divides ``sharded_parameters`` of the parameters and ``sharded_time`` of the
    time (a share; what norms and residuals take, every rank takes), and sums ``shard_sums``.
    ``optimizer_s`` is what Adam takes for the parameters (0: not measured). Of the parameters
    ``frozen_parameters`` are not trained. ``wants``, here and of skips and conditioning, says
    whether a backward gives back the gradient of what is taken. A layer that ``begins`` a further
    chain of a cascade takes nothing of the one before.
    """

    name: str
    parameters: int
    boundary_bytes: int
    sharded_parameters: int = 0
    shard_sums: ShardSums = ShardSums()
    optimizer_s: float = 0.0
    sharded_time: float = 1.0
    frozen_parameters: int = 0
    wants: bool = True
    begins: bool = False

    @property
    def trained_parameters(self) -> int:
        """Those that have gradients and an optimizer's state."""
        return self.parameters - self.frozen_parameters

    def of_rank(self, tensor: int) -> tuple[int, int]:
        """Parameters of each of ``tensor`` ranks that share the layer, and those that are trained:
        frozen ones are taken to be divided as all are."""
        whole = self.parameters - self.sharded_parameters
        count = whole + math.ceil(self.sharded_parameters / tensor)
        return count, math.ceil(self.trained_parameters * count / max(1, self.parameters))


@dataclass(frozen=True)
class ProfiledSkip:
    """A skip edge between layers, bytes per sample."""

    name: str
    source: int
    destination: int
    num_bytes: int
    wants: bool = True


@dataclass(frozen=True)
class ProfiledConditioning:
    """What layer ``source`` computes for ``consumers``, bytes per sample; ``embedder`` says whether
    the source can run on every device instead."""

    name: str
    source: int
    consumers: tuple[int, ...]
    num_bytes: int
    embedder: bool
    wants: bool = True
