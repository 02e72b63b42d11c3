"""Modules whose parameters have no shape before they are called, as ``nn.LazyLinear``."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parameter import is_lazy


def lazy_modules(module: nn.Module) -> Iterator[str]:
    """A fault for each module with lazy parameters or buffers."""
    for name, part in module.named_modules():
        own = (*part._parameters.items(), *part._buffers.items())
        if lazy := [each for each, tensor in own if is_lazy(tensor)]:
            yield (
                f"{name or 'it'} is a {type(part).__name__}, without shapes yet "
                f"({', '.join(lazy)}): give its sizes where it is made, or, for "
                "pulse.from_module, call the module once with an example first"
            )
