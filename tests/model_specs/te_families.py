"""Every family built of Transformer Engine's own classes, whose compiled parts are not there.

    python -m tests.model_specs.te_families .venv/transformer-engine

Its Python is that of the release; what its extension would define is made up as it is asked for:
classes without methods, enumerators with numbers. Nothing can be computed so. Prints, as JSON, for
each family the parameters with local layers and with Transformer Engine's: shapes, dtypes, and the
names of what Megatron notes of each.
"""

from __future__ import annotations

import importlib.machinery
import itertools
import json
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


def parameters(family: str, transformer_impl: str) -> dict[str, Any]:
    """Of a small backbone's layers, by name."""
    import torch

    from tests.model_specs.chains import make_context
    from tests.runtime.tiny import backbone

    context = make_context(torch.bfloat16, transformer_impl=transformer_impl)
    return {
        f"{layer.name}.{name}": (
            list(parameter.shape),
            str(parameter.dtype),
            sorted(key for key in vars(parameter) if not key.startswith("_")),
        )
        for layer in backbone(family).layers
        for name, parameter in layer.build(context).named_parameters()
    }


def linears(family: str) -> list[str]:
    """The classes of Transformer Engine in it."""
    import torch

    from tests.model_specs.chains import make_context
    from tests.runtime.tiny import backbone

    context = make_context(torch.bfloat16, transformer_impl="transformer_engine")
    modules = [m for layer in backbone(family).layers for m in layer.build(context).modules()]
    return sorted({type(m).__name__ for m in modules if type(m).__name__.startswith("TE")})


def main() -> None:
    """The command."""
    from megatron_pulse.integration.megatron import compat

    import_without_libraries(sys.argv[1])
    compat.install()
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    import tests.conftest  # noqa: F401  makes Megatron importable on a CPU
    from tests.runtime.tiny import FAMILIES

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    found = {
        family: {
            "local": parameters(family, "local"),
            "transformer_engine": parameters(family, "transformer_engine"),
            "classes": linears(family),
        }
        for family in FAMILIES
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
