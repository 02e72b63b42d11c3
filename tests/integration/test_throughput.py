"""Throughput report of a run: consistent figures in the log and in TensorBoard."""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pulse.integration.flags.pulse_options import PulseOptions
from megatron_pulse.integration.loop.throughput import (
    IntervalSums,
    ThroughputConstants,
    TimedStep,
    interval_sums,
    throughput_of,
)
from megatron_pulse.integration.planning import run_plan
from megatron_pulse.integration.pretrain import _tensor_parallel, set_cuda_connections
from megatron_pulse.planner.program.device_program import Run, Wait
from megatron_pulse.planner.schedule.operations import Operation, OpType
from megatron_pulse.profile.flops import count_flops, model_flops
from megatron_pulse.profile.roofline import PRESETS, known_device
from megatron_pulse.runtime.measure.recorder import StepTime, UtilizationMeter
from model_specs import load_backbone
from tests.integration.runs import BASE, TINY, pipeline, train
from tests.integration.test_bad_input import refuse
from tests.ranks import run_ranks

BATCH = 8
NUM_STEPS = 5


def timed_run(argv: list[str]) -> tuple[str, list[float]]:
    """Output of one rank, and its step times by a separate clock."""
    import megatron.training.training as training

    original, seconds = training.train_step, []

    def step(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = original(*args, **kwargs)
        seconds.append(time.perf_counter() - began)
        return result

    training.train_step = step
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        train(argv)
    return out.getvalue(), seconds


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """A fold over two ranks, logged at steps 2 and 4 of 5, and its TensorBoard."""
    folder = tmp_path_factory.mktemp("tensorboard")
    argv = [*TINY["uvit"], *BASE, *pipeline(2), "--log-throughput", "--log-interval", "2"]
    argv += ["--global-batch-size", str(BATCH), "--train-iters", str(NUM_STEPS)]
    argv += ["--tensorboard-dir", str(folder), "--eval-iters", "0"]
    return run_ranks(2, timed_run, argv), folder


def test_the_line_says_what_was_measured(said: tuple[list[Any], Path]) -> None:
    (first, seconds), (last, others) = said[0]
    assert "samples/s" not in first and "throughput per GPU" not in last
    lines = [line for line in last.splitlines() if " samples/s | " in line]
    assert len(lines) == 2
    speeds = [float(re.search(r" ([\d.e+]+) samples/s", x)[1]) for x in lines]  # type: ignore[index]
    for speed, steps in zip(speeds, (slice(1, 2), slice(2, 4)), strict=True):
        slowest = max(sum(own[steps]) for own in (seconds, others))
        num_steps = steps.stop - steps.start
        # It has its own clock, and between the two clocks anything may run.
        assert 0.5 * BATCH < speed * slowest / num_steps < 1.1 * BATCH
    for line in lines:
        assert re.search(r"TFLOP/s per device \| bubble \d+\.\d % \(plan \d+\.\d %\) \| peak", line)
        end = r"peak 0\.\d+ GB \(RSS\) \| 0:00:0\d left( \| waiting for data \d+ %)?$"
        assert re.search(end, line)
        assert "MFU" not in line  # nobody publishes a peak of this CPU


def test_tensorboard_has_it_too(said: tuple[list[Any], Path]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(said[1]))
    events.Reload()
    values = {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in ("samples-per-second", "tflops-per-device", "bubble", "bubble-planned",
                    "peak-memory-gb", "seconds-left", "waiting-for-data")
    }  # fmt: skip
    assert all(set(found) == {2, 4} for found in values.values()), values
    options = dict(text.split("=") for text in TINY["uvit"] if "=" in text)
    flops = model_flops(load_backbone("uvit-tiny", options))
    for at in (2, 4):
        assert 0 < values["bubble"][at] < 1 and 0 < values["bubble-planned"][at] < 1
        speed = values["samples-per-second"][at]
        assert values["tflops-per-device"][at] == pytest.approx(speed * flops / 2e12, rel=1e-4)
    assert values["seconds-left"][4] == pytest.approx(BATCH / speed, rel=1e-4)


def test_figures() -> None:
    """Two devices, the second slower; half and three quarters of the window computing."""
    steps = [
        TimedStep(16, 2.0, StepTime(1.0, 1.6)),
        TimedStep(16, 2.0, StepTime(1.0, 2.4)),
        TimedStep(16, 2, None),
    ]
    ranks = [interval_sums(steps, 10**9), IntervalSums(8.0, 3.0, 4.0, 3 * 10**9)]
    assert ranks[0] == IntervalSums(6.0, 2.0, 4.0, 10**9)
    found = throughput_of(ThroughputConstants(10**12, 24e12, 0.25, 2), steps, ranks, 1000, "CUDA")
    assert found.line() == (
        " throughput: 6 samples/s | 3 TFLOP/s per device | MFU 12.5 % | bubble 37.5 % (plan 25.0 %)"
        " | peak 3 GB (CUDA) | 0:44:27 left"
    )
    assert found.scalars()["mfu"] == 0.125
    traced = [TimedStep(16, 2.0, None)]
    unknown = throughput_of(
        ThroughputConstants(None, None, 0.0, 1), traced, [interval_sums(traced, 0)], 0, "RSS"
    )
    assert unknown.line() == " throughput: 8 samples/s | peak 0 GB (RSS) | 0:00:00 left"
    assert set(unknown.scalars()) == {
        "samples-per-second", "bubble-planned", "peak-memory-gb", "seconds-left",
        "waiting-for-data",
    }  # fmt: skip


def test_steps_that_wait_for_data_are_told() -> None:
    """A rank waits for a third of the time: without that, half more samples."""
    steps = [TimedStep(16, 2.0, None, 0.5), TimedStep(16, 2.0, None, 0.5)]
    ranks = [interval_sums(steps, 0), IntervalSums(3.0, 0, 0, 0, waited_s=4 / 3)]
    work = ThroughputConstants(None, None, 0.0, 2)
    found = throughput_of(work, steps, ranks, 0, "RSS")
    assert found.waiting == pytest.approx(1 / 3)
    assert found.line().endswith("waiting for data 33 %")
    assert "8 samples/s are loaded, and 12 could be trained on" in found.starved(2)
    assert "(now 2 a rank)" in found.starved(2)
    little = throughput_of(work, steps, [IntervalSums(4.0, 0, 0, 0, waited_s=0.3)], 0, "RSS")
    assert not little.starved(2) and little.line().endswith("waiting for data 8 %")


def test_the_meter_counts_operations_and_not_waiting() -> None:
    meter = UtilizationMeter(torch.device("cpu"))
    run = Run(Operation(OpType.FORWARD, 0, 0))
    for _ in range(2):  # each step begins at nothing
        least = most = 0.0  # what a busy machine makes of the seconds
        meter.start()
        for event, seconds in ((run, 0.02), (Wait(None), 0.05), (run, 0.01)):  # type: ignore[arg-type]
            before = time.perf_counter()
            meter.begin(event)
            began = time.perf_counter()
            time.sleep(seconds)
            ended = time.perf_counter()
            meter.end(event)
            if event is run:
                least += ended - began
                most += time.perf_counter() - before
        meter.stop()
        measured = meter.read()
        assert 0.03 <= least <= measured.busy_s <= most
        assert measured.window_s >= 0.05 + measured.busy_s


@pytest.mark.parametrize("name", ["uvit-tiny", "sd-tiny", "dit-tiny", "flux-tiny"])
def test_a_models_operations_are_three_forwards(name: str) -> None:
    """Attention's recomputation is not counted; unneeded input gradients are few."""
    forward = sum(layer.forward for layer in count_flops(load_backbone(name), flash=False))
    assert model_flops(load_backbone(name)) == pytest.approx(3 * forward, rel=0.02)


def test_peaks_are_those_of_the_device_at_hand() -> None:
    assert known_device("NVIDIA H200") is PRESETS["H200"]
    assert known_device("NVIDIA H100 80GB HBM3") is PRESETS["H100"]
    assert known_device("NVIDIA A100-SXM4-40GB") is PRESETS["A100-40GB"]
    assert known_device("NVIDIA A100-SXM4-80GB") is PRESETS["A100-80GB"]
    assert known_device("Tesla V100-SXM2-32GB") is PRESETS["V100-32GB"]
    assert known_device("NVIDIA GeForce RTX 4090") is PRESETS["4090-24GB"]
    for other in (
        "NVIDIA A100", "NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM-64GB",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "Tesla V100-SXM2-16GB", "Tesla V100-PCIE-32GB",
        "Tesla V100S-PCIE-32GB", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GH200 480GB", "NVIDIA H800",
        "NVIDIA RTX A1000 6GB Laptop GPU", "NVIDIA GeForce RTX 4090 D",
            "NVIDIA GeForce RTX 4090 Laptop GPU",
    ):  # fmt: skip
        assert known_device(other) is None, other


def test_layers_of_an_unknown_gpu_are_weighed_as_on_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And it is said, with what to do."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA RTX A1000")
    device, said = run_plan._this_device()
    assert device is PRESETS["A100-80GB"] and "peak rates of NVIDIA RTX A1000 are unknown" in said
    assert "--pulse-profile FILE" in said
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert run_plan._this_device() == (PRESETS["H200"], "")


def test_channels_have_hardware_queues_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """But where tensor parallelism wants one for all, or the environment says otherwise."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    for tensor_parallel, given, expected in (
        (1, {}, "32"),
        (2, {}, "1"),
        (2, {name: "8"}, "8"),
    ):
        environment = dict(given)
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", environment)
            set_cuda_connections(tensor_parallel)
        assert environment == {name: expected}
    flags = ["--lr", "1", "--tensor-model-parallel-size"]
    assert [_tensor_parallel(f) for f in ([*flags, "2"], flags, flags[:2], [f"{flags[2]}=4"])] == [
        2, 1, 1, 4,
    ]  # fmt: skip
    assert _tensor_parallel([*flags, "2", "--pulse-plan", "p"]) is None


@pytest.mark.parametrize("chosen", [None, "8"])
def test_tensor_parallelism_is_not_refused_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    """Megatron asks for one queue before CUDA has any, and refuses what a user has chosen."""
    from megatron.training import arguments

    from megatron_pulse.integration.flags.flag_constraints import CONNECTIONS

    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 9)
    monkeypatch.delenv(CONNECTIONS, raising=False)
    if chosen:
        monkeypatch.setenv(CONNECTIONS, chosen)
    (fault,) = refuse(monkeypatch, 2, ["--tensor-model-parallel-size", "2", "--lr", "0"])
    assert "--lr" in fault and os.environ.get(CONNECTIONS) == chosen


def test_a_plan_leaves_a_gpu_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what no plan counts; a limit that is given is taken as it is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen = SimpleNamespace(total_memory=80 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: seen)
    assert run_plan._memory_limit(PulseOptions()) == pytest.approx(72e9)
    assert run_plan._memory_limit(PulseOptions(memory_gb=80)) == 80e9
