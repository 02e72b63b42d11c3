"""Transformer Engine's Python, whose compiled parts are not there, imported as where they are.

It is that of the release; what its extension would define is made up as it is asked for: classes
without methods, enumerators with numbers. Nothing can be computed so but products of matrices,
which ``compute_on_host`` has torch compute.
"""

from __future__ import annotations

import importlib.machinery
import itertools
import os
import sys
import types
from typing import Any

_numbers = itertools.count(1)


class _Enumerators(type):
    @property
    def __members__(cls) -> dict[str, int]:
        return {name: value for name, value in vars(cls).items() if not name.startswith("_")}

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, next(_numbers))
        number: int = vars(cls)[name]
        return number


class _Compiled(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Enumerators(name, (), {})
        setattr(self, name, made)
        return made


def import_without_libraries(folder: str) -> None:
    """Import Transformer Engine from ``folder`` as where there is a GPU."""
    sys.path.insert(0, folder)
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its own way to be imported without libraries
    for name in ("transformer_engine_torch", "transformer_engine.pytorch.onnx_extensions"):
        sys.modules[name] = _Compiled(name)
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None
    import torch
    import transformer_engine.pytorch.module.base as base

    torch_there = types.SimpleNamespace(**vars(torch))
    torch_there.cuda = types.SimpleNamespace(**vars(torch.cuda))
    torch_there.cuda.is_available = lambda: True
    base.torch = torch_there


def compute_on_host() -> None:
    """Have Transformer Engine's linear layers compute on the CPU, and attention be torch's."""
    import torch
    import transformer_engine.pytorch.cpp_extensions.gemm as gemm
    import transformer_engine.pytorch.module.base as base
    import transformer_engine_torch as extension

    import model_specs.common.attention as attention

    extension.generic_gemm = _product
    gemm.get_cublas_workspace = lambda *given: torch.empty(1)
    torch.cuda.is_current_stream_capturing = lambda: False
    prepare = base.TransformerEngineBaseModule.prepare_forward
    on_gpu = property(lambda tensor: True)

    def prepared(self: Any, given: Any, **more: Any) -> Any:
        torch.Tensor.is_cuda = on_gpu
        try:
            return prepare(self, given, **more)
        finally:
            del torch.Tensor.is_cuda

    base.TransformerEngineBaseModule.prepare_forward = prepared
    attention.TEDotProductAttention = attention.SdpaCoreAttention


def _product(
    a: Any, transpose_a: bool, b: Any, transpose_b: bool, out: Any, quantizer: Any, dtype: Any,
    bias: Any, bias_dtype: Any, gelu: bool, gelu_in: Any, grad: bool, *rest: Any, **more: Any,
) -> tuple[Any, Any, None, None]:  # fmt: skip
    """b times a, with the sum of b's rows where a backward has a bias, as the extension gives."""
    left, right = b.flatten(0, -2), a.flatten(0, -2)
    product = (left.t() if transpose_b else left) @ (right.t() if transpose_a else right)
    if grad:
        return product, None if bias is None else left.sum(0), None, None
    product = product.view(*b.shape[:-1], -1)
    return product if bias is None else product + bias, None, None, None
