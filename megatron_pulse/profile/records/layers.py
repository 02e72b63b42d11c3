"""Profile records of layer, skip and conditioning edge, independent of the microbatch size."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ShardSums:
    """Tensors summed over tensor-parallel ranks, in bytes per sample.

    A forward sums the outputs of row-parallel linears (``rows``). A backward sums the gradients of
    column-parallel linears' inputs. ``columns`` are inputs of tokens, which sequence parallelism
    divides; ``contexts`` are whole on every rank. Recomputation ends with the last tensor that
    backward needs, and repeats the first ``repeated_rows`` sums (None: all, in older profiles).
    """

    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    repeated_rows: int | None = None


@dataclass(frozen=True)
class ProfiledLayer:
    """Properties of a layer that do not depend on the microbatch size.

    - ``boundary_bytes``: bytes per sample of all boundary tensors that the layer takes.
    - ``sharded_parameters``: number of parameters that tensor parallelism divides.
    - ``sharded_time``: fraction of time that tensor parallelism divides. Norms and residuals take
      the same time on every rank.
    - ``shard_sums``: tensors summed over tensor-parallel ranks.
    - ``optimizer_s``: seconds of Adam (0: not measured).
    - ``frozen_parameters``: number of parameters that are not trained.
    - ``wants``: the gradient of inputs is sent back. Skips and conditioning have the same field.
    - ``begins``: the layer begins a further chain of a cascade, and takes nothing from the previous
      layer.
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
        """Number of parameters with gradients and optimizer state."""
        return self.parameters - self.frozen_parameters

    def of_rank(self, tensor: int) -> tuple[int, int]:
        """Parameters per rank, and trained ones, with ``tensor`` tensor-parallel ranks.

        Frozen parameters are assumed to be divided in the same proportion.
        """
        whole = self.parameters - self.sharded_parameters
        count = whole + math.ceil(self.sharded_parameters / tensor)
        return count, math.ceil(self.trained_parameters * count / max(1, self.parameters))


@dataclass(frozen=True)
class ProfiledSkip:
    """Skip edge between layers, in bytes per sample."""

    name: str
    source: int
    destination: int
    num_bytes: int
    wants: bool = True


@dataclass(frozen=True)
class ProfiledConditioning:
    """Conditioning of layer ``source`` for ``consumers``, in bytes per sample.

    With ``embedder`` the source can run on every device instead.
    """

    name: str
    source: int
    consumers: tuple[int, ...]
    num_bytes: int
    embedder: bool
    wants: bool = True
