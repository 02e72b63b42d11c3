"""Training and evaluation mode of a traced module, and whether its graph depends on the mode."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from megatron_pulse.tracing.checks.torch_patches import replaced
from megatron_pulse.tracing.graph_analysis import TORCH

_PARTS_OF_TORCH = str(Path(TORCH) / "nn")


class ModuleModes:
    """Modes of a module's parts at construction: those of the training mode of its chain.

    In the chain's evaluation mode all parts are in evaluation mode. ``is_read`` is true if an
    export read a mode; ``matters`` if both modes differ besides.
    """

    def __init__(self, module: nn.Module) -> None:
        self._training = {part: part.training for part in module.modules()}
        self.is_read = False

    @property
    def matters(self) -> bool:
        """True if graphs may differ between the modes."""
        return self.is_read and any(self._training.values())

    @contextmanager
    def of_chain(self, training: bool) -> Iterator[None]:
        """Put the parts in the modes of a chain, noting reads; their own modes return on exit."""
        own = {part: part.training for part in self._training}
        for part, mode in self._training.items():
            part.training = mode and training
        try:
            with _reads(self._read):
                yield
        finally:
            for part, mode in own.items():
                part.training = mode

    def _read(self, part: nn.Module) -> None:
        is_void = isinstance(part, nn.modules.dropout._DropoutNd) and not part.p
        self.is_read |= part in self._training and not is_void


@contextmanager
def _reads(tell: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call ``tell`` with each module whose ``training`` is read, except by torch's export."""

    def read(module: nn.Module) -> bool:
        if "training" not in vars(module):  # of TorchScript
            raise AttributeError("training")
        file = sys._getframe(1).f_code.co_filename
        if not file.startswith(TORCH) or file.startswith(_PARTS_OF_TORCH):
            tell(module)
        mode: bool = vars(module)["training"]
        return mode

    def write(module: nn.Module, mode: bool) -> None:
        vars(module)["training"] = mode

    with replaced(nn.Module, "training", property(read, write)):
        yield
