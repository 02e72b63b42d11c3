"""That no layer writes into what a later one takes too."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megatron_pulse.backbone.chain import Layer


class Untouched:
    """Of what a layer is given, its ``shared`` inputs and skips (``shared_inputs``), and all
    conditioning, as they are when it is made."""

    def __init__(
        self,
        layer: Layer,
        shared: Mapping[int | str, str],
        inputs: tuple[Tensor, ...],
        popped: Mapping[str, Tensor],
        used: Mapping[str, Tensor],
    ) -> None:
        given: dict[str, Tensor] = {}
        for what, skip in shared.items():
            if isinstance(what, int):
                given[f"its input {what}, the skip {layer.own(skip)}"] = inputs[what]
            else:
                given[f"the skip {layer.own(what)}"] = popped[layer.own(what)]
        given |= {f"the conditioning {name}": tensor for name, tensor in used.items()}
        self._given = given
        self._versions = {what: tensor._version for what, tensor in given.items()}

    def fault(self) -> str | None:
        """What the layer has done to it since; None for nothing."""
        written = [
            what for what, tensor in self._given.items() if tensor._version != self._versions[what]
        ]
        if not written:
            return None
        return (
            f"writes into {' and '.join(written)}, which a later layer may take too: what it finds "
            "would depend on where the chain is cut (write x = x + 1 in the place of x += 1)"
        )
