"""Detection of in-place writes: into saved tensors, and into inputs that a later layer may take.

torch's own check refuses such backwards, but does not cover tensors that saved-tensor hooks
replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from megatron_pulse.backbone.chain import Layer
from megatron_pulse.runtime.failure_board import PulseError


def version_of(tensor: Tensor) -> int:
    """Number of in-place writes into a tensor; 0 for tensors of ``torch.inference_mode``.

    Those count no writes. No backward reads them, and outside that mode torch refuses to write.
    """
    return 0 if tensor.is_inference() else tensor._version


class InplaceWatch:
    """Detect in-place writes into a tensor without keeping its data alive.

    A detached alias shares the tensor's version counter; the alias's data is replaced by an empty
    tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._alias: Tensor | None = tensor.detach()
        self._version, self._written = tensor._version, False
        if tensor.layout is torch.strided:
            self._alias.data = _nothing(tensor.dtype, tensor.device)

    @property
    def is_written(self) -> bool:
        """True if the tensor was modified up to now, or up to ``settle``."""
        if self._alias is not None:
            self._written = self._alias._version != self._version
        return self._written

    def settle(self) -> None:
        """Stop watching: later writes do not count."""
        self._written = self.is_written
        self._alias = None


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def modified_inplace(layer: str) -> PulseError:
    """Error of a backward that reads a saved tensor modified in place."""
    return PulseError(
        f"layer {layer}: a tensor saved for backward was modified in place after forward, by this "
        "layer or the next (torch refuses that without recomputation or offload, too). Write x = "
        "x + 1 instead of x += 1"
    )


class SharedInputCheck:
    """Versions of a layer's ``shared`` inputs and skips (``shared_inputs``) and conditioning, at
    construction.
    """

    def __init__(
        self,
        layer: Layer,
        shared: Mapping[int | str, str],
        inputs: tuple[Tensor, ...],
        popped: Mapping[str, Tensor],
        used: Mapping[str, Tensor],
    ) -> None:
        self._layer, self._shared, self._used = layer, shared, tuple(used)
        self._given = [
            *(
                inputs[what] if isinstance(what, int) else popped[layer.own(what)]
                for what in shared
            ),
            *used.values(),
        ]
        self._versions = [version_of(tensor) for tensor in self._given]

    def fault(self) -> str | None:
        """Description of tensors that the layer modified since; None if there are none."""
        if self._versions == [version_of(tensor) for tensor in self._given]:
            return None
        own = self._layer.own
        names = [
            *(
                f"its input {what}, the skip {own(skip)}"
                if isinstance(what, int)
                else f"the skip {own(what)}"
                for what, skip in self._shared.items()
            ),
            *(f"the conditioning {name}" for name in self._used),
        ]
        told = zip(names, self._given, self._versions, strict=True)
        written = [name for name, tensor, version in told if version_of(tensor) != version]
        return (
            f"modifies {' and '.join(written)} in place. A later layer may read the same tensor, "
            "so results would depend on the partition. Write x = x + 1 instead of x += 1"
        )
