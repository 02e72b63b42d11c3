"""Detection of torch settings that a module changes while it runs; a graph does not record them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.backends import ContextProp

from megatron_pulse.tracing.checks.torch_patches import caller, replaced

_ATTENTION = "the choice of attention kernels (sdpa_kernel)"
_CUDNN = "the use of cuDNN (torch.backends.cudnn)"
_CPU = "the choice of CPU kernels (torch.backends.mkldnn, .nnpack)"
_SUMS = "the accumulation of matrix products (torch.backends.cuda.matmul)"
_GETTERS = {
    **{f"_get_{kind}_sdp_enabled": _ATTENTION for kind in ("flash", "mem_efficient", "math")},
    "_get_cudnn_sdp_enabled": _ATTENTION,
    **{f"_get_cudnn_{what}": _CUDNN for what in ("enabled", "benchmark", "deterministic")},
    **{f"_get_{what}": _CPU for what in ("mkldnn_enabled", "mkldnn_deterministic")},
    "_get_nnpack_enabled": _CPU,
    "_get_cublas_allow_fp16_reduced_precision_reduction": _SUMS,
    "_get_cublas_allow_bf16_reduced_precision_reduction": _SUMS,
    "_get_cublas_allow_fp16_accumulation": _SUMS,
    "_get_deterministic_algorithms": "the use of deterministic algorithms",
}
"""Getters of torch._C, as far as available; most setters have ``_set_`` for ``_get_``."""
_SETTERS = (
    *(name.replace("_get_", "_set_", 1) for name in _GETTERS if "_sdp_" not in name),
    *(f"_set_sdp_use_{kind}" for kind in ("flash", "mem_efficient", "math", "cudnn")),
    *(f"_set_{what}_allow_tf32" for what in ("cudnn", "cublas", "onednn")),
    "_set_float32_matmul_precision",
    "_set_fp32_precision_setter",
    "_set_default_dtype",
)
_PRECISION = "the precision of fp32 (allow_tf32, set_float32_matmul_precision)"
_EXPORTING = str(Path(__file__).parents[1] / "torch_export.py")


@contextmanager
def changed_settings(faults: list[str]) -> Iterator[None]:
    """Add a fault for each setting that a module changes to another value than outside."""
    outside, of_export = settings_now(), dict[str, object]()

    def telling(setter: Callable[..., Any]) -> Callable[..., Any]:
        def checked_setter(*args: Any, **kwargs: Any) -> Any:
            before = settings_now()
            result = setter(*args, **kwargs)
            of = getattr(args[0], "setter", setter) if args else setter  # a ContextProp's
            own = of.__name__.replace("_set_", "_get_", 1)
            place = caller()
            for name, value in settings_now().items():
                if place.startswith(_EXPORTING):
                    of_export[name] = value
                    continue
                again = before[name] == outside[name] and value == of_export.get(name)
                if value != outside[name] and not again and (value != before[name] or name == own):
                    faults.append(
                        f"{_GETTERS.get(name, name)} is set in forward, at {place}: a graph "
                        "stores no settings. Set it around the whole training"
                    )
            return result

        return checked_setter

    with ExitStack() as patches:
        for name in _SETTERS:
            if (setter := getattr(torch._C, name, None)) is not None:
                patches.enter_context(replaced(torch._C, name, telling(setter)))
        # ContextProp holds references to the original setters
        patches.enter_context(replaced(ContextProp, "__set__", telling(ContextProp.__set__)))
        yield


def settings_now() -> dict[str, object]:
    """Current settings, by getter or description."""
    found = {name: getattr(torch._C, name)() for name in _GETTERS if hasattr(torch._C, name)}
    return {**found, "the default dtype": torch.get_default_dtype(), _PRECISION: _precisions()}


def _precisions() -> list[str]:
    get = getattr(torch._C, "_get_fp32_precision_getter", None)
    if get is None:  # torch before 2.9
        names = ("_get_cudnn_allow_tf32", "_get_cublas_allow_tf32", "_get_float32_matmul_precision")
        return [str(getattr(torch._C, name)()) for name in names]
    places = [("generic", "all")]
    places += [(on, what) for on in ("cuda", "mkldnn") for what in ("all", "matmul", "conv", "rnn")]
    # the default "none" is as precise as "ieee"
    return [str(get(*place)).replace("none", "ieee") for place in places]
