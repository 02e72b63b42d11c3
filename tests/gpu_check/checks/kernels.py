"""What kernels take: memory formats, attention by head size, what steps are made of, optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tests.gpu_check.alone import Alone, alone, join, models, timed
from tests.gpu_check.bench import Bench
from tests.gpu_check.check import Figures

HEADS = (32, 40, 64, 72, 80, 88, 96, 128, 160, 256)
KINDS = (
    ("attention", ("attention", "softmax")),
    ("convolutions", ("conv",)),
    ("norms", ("norm",)),
    ("products", ("mm", "linear", "matmul", "bmm")),
    ("copies", ("copy", "clone", "cat", "contiguous", "fill", "zero", "memcpy", "memset")),
)
"""Of an operator by what is in its name; the first that fits."""


def each(bench: Bench) -> Iterator[tuple[str, Alone]]:
    """The models that fit, one at a time; others are listed in the figures."""
    import torch

    config = join()
    for name in models(bench):
        one = None
        try:
            one = alone(bench, config, name)
            one.step()
        except torch.OutOfMemoryError as error:
            bench.figures[f"{name} does not fit"] = str(error)[:100]
        else:
            yield name, one
        if one is not None:  # whoever has it does not keep its memory
            one.pipeline, one.batches = None, []
        if bench.on_gpu:
            torch.cuda.empty_cache()


def channels_last(bench: Bench) -> Figures:
    """Steps of UNets with their weights as they are and in channels_last."""
    import torch

    rows = bench.rows("steps")
    for name, one in each(bench):
        if not any(p.dim() == 4 for p in one.pipeline.parameters()):
            continue
        (_, plain) = one.seconds()
        for stage in one.pipeline.stages.values():
            stage.to(memory_format=torch.channels_last)
        (_, last) = one.seconds()
        rows.append(
            {"model": name, "contiguous ms": 1e3 * plain, "channels_last ms": 1e3 * last,
             "saved %": 100 * (1 - last / plain)}
        )  # fmt: skip
    assert rows, "no model with convolutions was measured"
    return bench.figures


def attention(bench: Bench) -> Figures:
    """Forward and backward of attention by head size and kernel, in microseconds."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    device = torch.device("cuda", 0) if bench.on_gpu else torch.device("cpu")
    tokens, heads = (1024, 16) if bench.on_gpu else (64, 2)
    dtype = torch.bfloat16 if bench.on_gpu else torch.float32
    kernels = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
    rows = bench.rows("microseconds")
    for size in HEADS:
        given = [
            torch.randn(2, heads, tokens, size, device=device, dtype=dtype, requires_grad=True)
            for _ in range(3)
        ]

        def run(given: list[Any] = given) -> None:
            made = torch.nn.functional.scaled_dot_product_attention(*given)
            torch.autograd.grad(made.sum(), given)

        row: dict[str, Any] = {"head size": size}
        rows.append(row)
        for name, kernel in kernels.items():
            try:
                with sdpa_kernel(kernel):
                    run()
                    row[name] = 1e6 * min(timed(run, device)[1] for _ in range(5))
            except RuntimeError:
                row[name] = "refused"
        run()
        row["chosen by torch"] = 1e6 * min(timed(run, device)[1] for _ in range(5))
    return bench.figures


def shares(bench: Bench) -> Figures:
    """What a step's time is spent on, by kinds of operators; of a GPU's time where there is one."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    rows = bench.rows("percent")
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * bench.on_gpu]
    for name, one in each(bench):
        one.seconds(1)
        with profile(activities=activities) as seen:
            timed(one.step, one.device)
        took: Counter[str] = Counter()
        for event in seen.key_averages():
            if event.device_type == DeviceType.CPU:  # operators, with their kernels' time
                own = event.self_device_time_total if bench.on_gpu else event.self_cpu_time_total
                took[kind_of(event.key)] += own
        whole = took.total()
        assert whole > 0, f"the profiler saw nothing of {name}"
        row: dict[str, Any] = {"model": name, "ms": whole / 1e3}
        rows.append(row | {kind: 100 * took[kind] / whole for kind in (*dict(KINDS), "others")})
    return bench.figures


def kind_of(operator: str) -> str:
    """The kind of an operator, by its name."""
    name = operator.lower()
    return next((kind for kind, parts in KINDS if any(p in name for p in parts)), "others")


def host_time(bench: Bench) -> Figures:
    """What the host takes to enqueue an operation beside what that takes, and the idle share."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    rows = bench.rows("steps")
    for name, one in each(bench):
        host, whole = one.seconds()
        count = 2 * len(one.batches)
        row: dict[str, Any] = {
            "model": name, "operations": count, "host us an operation": 1e6 * host / count,
            "us an operation": 1e6 * whole / count,
        }  # fmt: skip
        if bench.on_gpu:
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                timed(one.step, one.device)
            kernels = [e for e in seen.key_averages() if e.device_type != DeviceType.CPU]
            busy = sum(e.self_device_time_total for e in kernels) / 1e6
            row["kernels an operation"] = sum(e.count for e in kernels) / count
            row["GPU idle %"] = 100 * max(0.0, 1 - busy / whole)
        rows.append(row)
    from tests.benchmarks.micro import splitting

    bench.figures["splitting a small layer's backward, CPU us"] = [
        {"layer": s.layer, "whole": s.whole_us, "added": s.added_us} for s in splitting(10, 20)
    ]
    return bench.figures


def optimizers(bench: Bench) -> Figures:
    """Neighbourhood of Adam and of averaging, on all parameters of a model in fp32."""
    import torch

    from megatron_pulse.diffusion.ema import ExponentialMovingAverage

    name = next(iter(models(bench)))
    one = alone(bench, join(), name)
    device = one.device
    named = [(n, p.detach().float().clone()) for n, p in one.pipeline.named_parameters()]
    del one
    parameters = [torch.nn.Parameter(value) for _, value in named]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    bench.figures |= {"model": name, "parameters": sum(p.numel() for p in parameters)}
    rows = bench.rows("milliseconds")

    def measure(what: str, make: Callable[[], Callable[[], Any]]) -> None:
        try:
            work = make()
            work()
            rows.append({"what": what, "ms": 1e3 * min(timed(work, device)[1] for _ in range(5))})
        except (RuntimeError, ImportError) as error:
            rows.append({"what": what, "ms": f"refused: {str(error)[:80]}"})

    def adamw(**variant: bool) -> Callable[[], Callable[[], Any]]:
        return lambda: torch.optim.AdamW(parameters, lr=1e-9, **variant).step

    def ours() -> Callable[[], Any]:
        from megatron_pulse.integration.megatron.compat import FusedAdam

        return FusedAdam(parameters, lr=1e-9).step

    measure("AdamW, one by one", adamw(foreach=False))
    measure("AdamW, foreach", adamw(foreach=True))
    measure("AdamW, fused", adamw(fused=True))
    measure("AdamW, ours", ours)
    average = ExponentialMovingAverage(named)
    measure("averages, ours", lambda: lambda: average.update(named, 5))
    plain = [value.clone() for _, value in named]

    def one_by_one() -> None:
        for mine, (_, value) in zip(plain, named, strict=True):
            mine.lerp_(value, 0.1)

    measure("averages, one by one", lambda: one_by_one)
    assert isinstance(rows[1]["ms"], float) and isinstance(rows[3]["ms"], float), rows
    return bench.figures
