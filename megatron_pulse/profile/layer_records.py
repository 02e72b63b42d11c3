"""Profile records: sizes of layers, skips and conditioning edges, and layer times by batch size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_pulse.profile.context_costs import ContextCosts


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
    - ``needs_grad``: the gradient of inputs is sent back. Skips and conditioning have the same
      field.
    - ``begins``: the layer begins a further chain of a cascade, and takes nothing from the previous
      layer.
    - ``quantized_parameters``: number of frozen parameters that are quantised; they take
      ``quantized_bytes``.
    - ``offloaded``: the frozen parameters are in host memory.
    """

    name: str
    parameters: int
    boundary_bytes: int
    sharded_parameters: int = 0
    shard_sums: ShardSums = ShardSums()
    optimizer_s: float = 0.0
    sharded_time: float = 1.0
    frozen_parameters: int = 0
    needs_grad: bool = True
    begins: bool = False
    quantized_parameters: int = 0
    quantized_bytes: int = 0
    offloaded: bool = False

    @property
    def trained_parameters(self) -> int:
        """Number of parameters with gradients and optimizer state."""
        return self.parameters - self.frozen_parameters

    def stored_parameters(self, element_bytes: int) -> int:
        """Parameters, where quantised ones count as as many as take their bytes."""
        whole = self.parameters - self.quantized_parameters
        return whole + math.ceil(self.quantized_bytes / element_bytes)

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
    needs_grad: bool = True


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
    needs_grad: bool = True


SPREAD = 0.3
"""Interquartile range, relative to the time, above which a measurement was disturbed."""


@dataclass(frozen=True)
class LayerTimes:
    """One layer at one microbatch size: mean times, interquartile ranges, and bytes.

    - ``weight_grad_s``: time of the whole backward minus that of the input gradient alone.
    - ``split_*_s``: times with deferred weight gradients: forward, backward without them, and
      these.
    - ``peak_bytes``: peak of one forward and backward, beyond parameters and inputs. A parameter's
      gradient counts only while being computed.
    - ``recompute_bytes``: bytes that recomputation creates and keeps until backward, besides
    inputs.
    - ``passed_bytes``: bytes of inputs that the previous layer was called with too.
    - ``forward_bytes``: peak of a forward that keeps nothing.
    - ``wgrad_bytes``: bytes held by deferred weight gradients after the input gradient.
    - ``selective_bytes``: bytes saved under selective recomputation (0: unknown).
    - ``selective_peak_bytes``: peak under selective recomputation.
    - ``selective_s``: additional time under selective recomputation.
    - ``halved_s``: forward and backward on one of two tensor-parallel ranks, without their sums (0:
      see ``ProfiledLayer.sharded_time``).

    - ``unrepeated_s``: end of a forward in slices of tokens that recomputation does not repeat (0:
      unknown).

    Either all layers of a profile have a ``split_*_s``, or none (0: not measured, as without
    deferral). The same holds for each bytes field after ``peak_bytes`` (0: as much as is saved,
    beyond what is kept).
    """

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    forward_spread_s: float
    input_grad_spread_s: float
    weight_grad_spread_s: float
    saved_bytes: int
    peak_bytes: int
    split_forward_s: float = 0.0
    split_input_grad_s: float = 0.0
    split_weight_grad_s: float = 0.0
    recompute_bytes: int = 0
    passed_bytes: int = 0
    forward_bytes: int = 0
    wgrad_bytes: int = 0
    selective_bytes: int = 0
    selective_peak_bytes: int = 0
    selective_s: float = 0.0
    halved_s: float = 0.0
    unrepeated_s: float = 0.0

    def parts_s(self, split: bool) -> tuple[float, float, float]:
        """Forward, input gradient and weight gradient; with ``split`` for deferred weight
        gradients.
        """
        found = self.split_forward_s, self.split_input_grad_s, self.split_weight_grad_s
        if split and any(found):
            return found
        return self.forward_s, self.input_grad_s, self.weight_grad_s

    def repeated_s(self, split: bool) -> float:
        """Time of the forward that recomputation repeats."""
        return max(0.0, self.parts_s(split)[0] - self.unrepeated_s)

    def kept_bytes(self, selective: bool) -> int:
        """Bytes saved, with or without selective recomputation."""
        return self.selective_bytes or self.saved_bytes if selective else self.saved_bytes

    def most_bytes(self, selective: bool) -> int:
        """Peak bytes, with or without selective recomputation."""
        return self.selective_peak_bytes or self.peak_bytes if selective else self.peak_bytes

    @property
    def whole_s(self) -> float:
        """Forward and backward time."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s

    @property
    def spread(self) -> float:
        """Largest interquartile range, relative to the whole time."""
        ranges = (self.forward_spread_s, self.input_grad_spread_s, self.weight_grad_spread_s)
        return max(ranges) / self.whole_s if self.whole_s else 0.0


@dataclass(frozen=True)
class ProfiledShape:
    """Costs at one of several sample shapes, a bucket, beside the merged ones of a profile.

    ``name`` is the shape of the first layer's input, as in 4x64x96; ``share`` the fraction of all
    samples. The other fields are those of ``Profile``.
    """

    name: str
    share: float
    layers: tuple[ProfiledLayer, ...]
    times: Mapping[int, tuple[LayerTimes, ...]]
    skips: tuple[ProfiledSkip, ...]
    conditioning: tuple[ProfiledConditioning, ...]
    context: ContextCosts | None = None


@dataclass(frozen=True)
class KindTimes:
    """Costs on one kind of device, beside the slowest ones of a profile of unlike devices.

    ``device`` and ``times`` are those of ``Profile``; ``optimizer_s`` are the layers' seconds of
    Adam.
    """

    device: str
    times: Mapping[int, tuple[LayerTimes, ...]]
    optimizer_s: tuple[float, ...]


BYTE_FIELDS = {name for name in LayerTimes.__dataclass_fields__ if name.endswith("_bytes")}
"""Fields of ``LayerTimes`` that are bytes."""

NO_SPREAD = 0.0, 0.0, 0.0
"""Interquartile ranges of times that were not measured."""


def between(
    a: LayerTimes,
    b: LayerTimes,
    share: float,
    proportional: bool = False,
    least: float = 0.0,
) -> LayerTimes:
    """Interpolate at ``share`` of the way from ``a`` to ``b`` (to twice ``a`` if ``proportional``).

    Below ``a`` the result is at least ``least`` times ``a``; beyond ``b`` at least ``b``.
    """
    mixed: dict[str, Any] = {}
    for name in LayerTimes.__dataclass_fields__:
        start, end = getattr(a, name), getattr(b, name)
        step = start if proportional else end - start
        floor = least * start if share < 0 else end if share > 1 else 0.0
        mixed[name] = max(floor, float(start + share * step))
    for name in mixed.keys() & BYTE_FIELDS:
        mixed[name] = round(mixed[name])
    return LayerTimes(**mixed)
