"""Check that no layer modifies tensors in place that a later layer may take."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megatron_pulse.backbone.chain import Layer


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
        self._versions = [tensor._version for tensor in self._given]

    def fault(self) -> str | None:
        """Description of tensors that the layer modified since; None if there are none."""
        if self._versions == [tensor._version for tensor in self._given]:
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
        written = [name for name, tensor, version in told if tensor._version != version]
        return (
            f"writes into {' and '.join(written)}, which a later layer may take too: what it finds "
            "would depend on where the chain is cut (write x = x + 1 in the place of x += 1)"
        )
