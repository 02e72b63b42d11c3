"""Run the released Megatron unmodified on CPU with gloo, and repair faults of its wheel.

``install()`` must run before the first ``import megatron``. It replaces the ``torch.cuda``
functions that Megatron calls unconditionally, and makes tensors of a CUDA device on the CPU. With a
CUDA device present it only imports Megatron. ``patch_megatron()`` runs after ``import
megatron.training``; most of its patches are for GPUs as well.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

from megatron_pulse.processes import hide_package_warnings
from megatron_pulse.runtime.parameters.adam import update

CPU = torch.device("cpu")
TESTED_MEGATRON = ("0.19.",)


class UnsupportedMegatron(ImportError):
    """Installed megatron-core of a version that this package was not tested with."""


def require_tested_megatron() -> None:
    """Raise UnsupportedMegatron unless megatron-core 0.19.x is installed."""
    version = importlib.metadata.version("megatron-core")
    if not version.startswith(TESTED_MEGATRON):
        raise UnsupportedMegatron(
            f"megatron_pulse was tested with megatron-core 0.19.x, but {version} is installed; "
            "install it with: pip install 'megatron-core[training]>=0.19.2,<0.20'"
        )


def _names_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return bool(device.type == "cuda")
    return isinstance(device, str) and device.split(":")[0] == "cuda"


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the tensor constructor ``make`` to use the CPU instead of a CUDA device."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return make(*args, **kwargs)

    return made


def _replace_what_names_cuda() -> None:
    """Make new tensors of CUDA devices on the CPU, and give tensor types their CUDA names.

    Only these few names are replaced. A ``TorchFunctionMode`` would intervene in every call of
    torch, which slows a small step.
    """
    constructors = _device_constructors()
    for name, make in list(vars(torch).items()):
        if callable(make) and make in constructors:
            setattr(torch, name, _on_cpu(make))
    type_of = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return 'torch.cuda.FloatTensor' and the like, which Megatron's optimizers expect."""
        found = type_of(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    torch.Tensor.type = cuda_type
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


class _NullStream:
    """Replacement of torch.cuda.Stream and torch.cuda.Event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _NullStream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    wait_stream = wait_event = record = wait = synchronize = _nothing

    def record_event(self, event: object = None) -> _NullStream:
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


class _Zeros(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return 0


def _make_nothing() -> Callable[..., None]:
    """Return a new function each time; torch._dynamo refuses one object under two names."""
    return lambda *args, **kwargs: None


def _replace_torch_cuda() -> None:
    default = torch.random.default_generator
    stream = _NullStream()
    properties = types.SimpleNamespace(name="cpu", major=10, minor=0, total_memory=0)
    replacements: dict[str, Any] = {
        "current_device": lambda: CPU,
        "device_count": lambda: 1,
        "Stream": _NullStream,
        "Event": _NullStream,
        "current_stream": lambda *args, **kwargs: stream,
        "default_stream": lambda *args, **kwargs: stream,
        "stream": lambda stream=None: contextlib.nullcontext(),
        "get_device_properties": lambda *args, **kwargs: properties,
        "memory_stats": lambda *args, **kwargs: _Zeros(),
        "manual_seed": lambda seed: default.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: default.manual_seed(int(seed)),
        "get_rng_state": lambda device=None: torch.random.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.random.set_rng_state(state),
    }
    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "set_stream",
        "reset_peak_memory_stats",
    ):
        replacements[name] = _make_nothing()
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state


def _identity_compile(fn: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Replacement of ``torch.compile`` without inductor; Megatron compiles at import."""
    return fn if fn is not None else (lambda inner: inner)


_stands_in = False
_patched = False


def install() -> None:
    """Import Megatron, and without CUDA first make its import and its runs possible."""
    global _stands_in
    require_tested_megatron()
    hide_package_warnings()  # which every rank would show
    if _stands_in:
        return
    if torch.cuda.is_available():
        _import_without_wandb()
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("compat.install() must run before megatron is imported")
    _hide_kernels()
    _replace_torch_cuda()
    torch.compile = _identity_compile
    torch.nn.Module.cuda = lambda self, device=None: self
    _replace_what_names_cuda()
    _stands_in = True
    _import_without_wandb()


def _hide_kernels() -> None:
    """Hide packages with kernels from Megatron, which uses them if installed.

    Without a GPU they can be imported, and fail in the first step.
    """
    for package in ("transformer_engine", "apex", "amp_C"):
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]


def _import_without_wandb() -> None:
    """Import ``megatron.core`` without wandb, which its timers import slowly and few runs need.

    ``training.train`` gives wandb to the timers if a run uses it.
    """
    if "wandb" in sys.modules or "megatron.core" in sys.modules:
        return
    sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("megatron.core.timers")
    finally:
        del sys.modules["wandb"]


class FusedAdam(torch.optim.Optimizer):
    """AdamW with Apex's interface in plain torch: ``step`` lives in the parameter group.

    Megatron's distributed optimizer cannot resume ``torch.optim.AdamW``, since it expects one step
    per group. This class is used if neither Transformer Engine nor Apex is installed.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **unused: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Make one AdamW update of every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            # On a GPU, one kernel updates many parameters and reads the step counts there.
            fused = bool(params) and params[0].is_cuda
            device = params[0].device if fused else CPU
            counts = torch.full((len(params),), float(group["step"] - 1), device=device)
            firsts = [self.state[p]["exp_avg"] for p in params]
            seconds = [self.state[p]["exp_avg_sq"] for p in params]
            lists = params, [p.grad for p in params], firsts, seconds
            update(group, lists, list(counts.unbind()), fused, self.adam_w_mode)


def _use_fused_adam() -> None:
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    if optimizer.USING_PYTORCH_OPTIMIZER:
        optimizer.Adam = distributed.Adam = FusedAdam
        optimizer.USING_PYTORCH_OPTIMIZER = False
        distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True


def _use_host_optimizer() -> None:
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    from megatron_pulse.integration.megatron.optimizer_offload import HostOptimizer
    from megatron_pulse.runtime.parameters.adam import HostAdam

    optimizer.CPUAdam = HostAdam
    optimizer.HybridDeviceOptimizer = distributed.HybridDeviceOptimizer = HostOptimizer


def _begin_sgd_state() -> None:
    """Give SGD the state that a checkpoint is loaded into, as other optimizers have it."""
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    original = MegatronOptimizer.__init__

    def init(self: Any, optimizer: Any, config: Any, init_state_fn: Any = None) -> None:
        original(self, optimizer, config, init_state_fn or begin_sgd)

    MegatronOptimizer.__init__ = init


def begin_sgd(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    """Create momenta of zero, which make the same first step as none.

    torch's SGD keeps none without momentum; Apex and Transformer Engine always keep them.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and not group["momentum"]:
            continue
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)


def patch_megatron() -> None:
    """Apply the patches that need ``megatron.training`` to be imported. Runs once per process."""
    global _patched
    if _patched:
        return
    _patched = True
    import megatron.core.datasets.utils as dataset_utils
    import megatron.core.optimizer.distrib_optimizer as distributed
    import megatron.training.training as training

    from megatron_pulse.integration.megatron.linear_wgrad import defer_wgrad

    # The wheel ships compiled dataset helpers but no Makefile, and `make` failing exits.
    if not os.path.exists(os.path.join(os.path.dirname(dataset_utils.__file__), "Makefile")):
        dataset_utils.compile_helpers = lambda: None
    # Loading fp32 parameters copies into a view of a leaf that requires grad.
    optimizer_class = distributed.DistributedOptimizer
    optimizer_class._set_main_param_and_optimizer_states = torch.no_grad()(
        optimizer_class._set_main_param_and_optimizer_states
    )
    # The original parses the command line again, for --enable-ft-package, which is refused.
    training.ft_integration.setup = lambda: None
    _use_fused_adam()
    _use_host_optimizer()
    _begin_sgd_state()
    defer_wgrad()
    # The original compiles and runs kernels of language models, which no layer here has.
    training.set_jit_fusion_options = lambda tp_size=None: torch.cuda.empty_cache()
    if not _stands_in:
        _keep_to_one_stream(training)
        _copy_together()
        return
    import megatron.core.tensor_parallel.random as parallel_random

    def set_rng_state(state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.random.set_rng_state(state)

    parallel_random._set_cuda_rng_state = set_rng_state
    training.initialize_megatron = functools.partial(
        training.initialize_megatron, allow_no_cuda=True
    )


def _keep_to_one_stream(training: Any) -> None:
    """Make Megatron construct DDP on the computing stream.

    Megatron constructs DDP on another stream, where autograd then accumulates gradients. Each
    gradient would be marked as used on that stream. Its memory would stay allocated until the host
    has seen the stream pass it.
    """
    wrap = training.wrap_model_chunks_with_ddp

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.stream(torch.cuda.default_stream()):
            return wrap(*args, **kwargs)

    training.wrap_model_chunks_with_ddp = wrapped


def _copy_together() -> None:
    """Make clipping and rounding to parameters use one kernel for many tensors, with equal bits.

    Without Transformer Engine or Apex, Megatron launches one kernel per tensor.
    """
    import megatron.core.optimizer.clip_grads as clip_grads
    import megatron.core.optimizer.optimizer as optimizer
    from megatron.core.utils import local_multi_tensor_scale

    copy_one_by_one = optimizer._multi_tensor_copy_this_to_that

    def scale(chunk_size: int, overflow: Any, lists: list[list[torch.Tensor]], by: float) -> None:
        if lists[0] is lists[1] and lists[0]:
            torch._foreach_mul_(lists[0], by)
        else:
            local_multi_tensor_scale(chunk_size, overflow, lists, by)

    def copy(
        this: list[torch.Tensor], that: list[torch.Tensor], overflow_buf: torch.Tensor | None = None
    ) -> None:
        if overflow_buf is not None or not this:
            copy_one_by_one(this, that, overflow_buf)
        else:
            torch._foreach_copy_(that, this)

    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = scale
    optimizer._multi_tensor_copy_this_to_that = copy


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Optimizers of a chain, without stubs of ranks that have nothing to optimize."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in chain if not inner.is_stub_optimizer]
