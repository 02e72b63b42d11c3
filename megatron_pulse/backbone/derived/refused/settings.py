"""Settings of torch that change while a module runs: a graph holds operations, not these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_pulse.backbone.derived.refused.telling import caller, replaced

_SETTERS = {
    **dict.fromkeys(
        [f"_set_sdp_use_{kind}" for kind in ("flash", "mem_efficient", "math", "cudnn")],
        "the kernels of attention (sdpa_kernel)",
    ),
    "_set_default_dtype": "the default dtype",
}
"""Of torch._C. An export sets others itself."""


@contextmanager
def changed_settings(faults: list[str]) -> Iterator[None]:
    """Within, each setting that is set to another value than it has is a fault."""

    def set_by(name: str) -> Callable[[Any], Any]:
        setter, what = getattr(torch._C, name), _SETTERS[name]

        def set_and_tell(value: Any) -> Any:
            before = _now()
            result = setter(value)
            if _now() != before:
                faults.append(
                    f"{what} is set in forward, at {caller()}: a graph holds no settings; set it "
                    "around the whole training"
                )
            return result

        return set_and_tell

    with ExitStack() as patches:
        for name in _SETTERS:
            patches.enter_context(replaced(torch._C, name, set_by(name)))
        yield


def _now() -> tuple[Any, ...]:
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        torch.get_default_dtype(),
    )
