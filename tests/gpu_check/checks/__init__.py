"""All checks, in the order in which they are run: what others build on comes first."""

from __future__ import annotations

from tests.gpu_check.check import Check, Need

_HERE = "tests.gpu_check.checks"


def _check(
    name: str, module: str, why: str, need: Need = Need.NOTHING, limit_s: float = 300.0
) -> Check:
    return Check(name, f"{_HERE}.{module}:{name.replace('-', '_')}", why, need, limit_s)


CHECKS = (
    _check("versions", "basics", "what is installed", limit_s=60),
    _check("commands", "basics", "imports leave CUDA alone, commands say how they are called"),
    _check("gpu-tests", "basics", "the tests that are skipped elsewhere", Need.GPU, 600),
    _check("losses", "numbers", "one rank over NCCL computes a CPU's losses", Need.GPU),
    _check("synchronisations", "numbers", "where a step's host waits for the GPU", Need.GPU),
    _check("families", "numbers", "every tiny family trains in bf16", limit_s=900),
    _check("deterministic", "numbers", "the same run twice, bit for bit", limit_s=400),
    _check("split-backwards", "numbers", "whole and split backwards, bit for bit", limit_s=400),
    _check("moved-activations", "numbers", "on the host or computed again, bits", limit_s=400),
    _check("engine", "numbers", "Transformer Engine's layers, whole and split", Need.GPU),
    _check("checkpoints", "numbers", "saved here, continued on a CPU and back", limit_s=400),
    _check("samples", "numbers", "a checkpoint is sampled from and exported"),
    _check("profiles", "costs", "measured layers beside analytic ones", limit_s=1800),
    _check("channels-last", "kernels", "UNets' weights in channels_last or not", limit_s=900),
    _check("attention", "kernels", "which kernel is soonest for a head size"),
    _check("shares", "kernels", "the share of norms, copies and all else", limit_s=900),
    _check("plans", "costs", "peaks and steps beside what plans predict", limit_s=1800),
    _check("offload", "costs", "a step whose activations wait on the host, and its peak"),
    _check("auto", "costs", "measured, planned and trained in one command", limit_s=600),
    _check("too-large", "costs", "what does not fit is said in one message", Need.GPU),
    _check("host-time", "kernels", "the host's time for an operation, idle share", limit_s=900),
    _check("optimizers", "kernels", "variants of Adam and of averaging"),
    _check("loader", "costs", "loading by workers, copies from pinned memory"),
    _check("self-send", "messages", "a message to oneself, 64 B to 64 MB", Need.GPU),
    _check("all-reduce", "ranks", "sums over two ranks", Need.TWO_RANKS),
    _check("folds", "ranks", "folds over 2 and 4 ranks are one rank's bits", Need.TWO_RANKS, 600),
    _check("schedules", "ranks", "all schedules and placements, bits", Need.TWO_RANKS, 1800),
    _check("probe", "ranks", "links between two ranks, as pulse probe has them", Need.TWO_RANKS),
    _check("run-ahead", "ranks", "what many messages hold in memory", Need.TWO_RANKS),
    _check("channels", "ranks", "channels beside one group", Need.TWO_RANKS_ON_GPUS),
    _check("data-parallel", "ranks", "two replicas, distributed optimizer", Need.TWO_RANKS),
    _check("tensor-parallel", "ranks", "layers on two ranks", Need.TWO_RANKS),
    _check("killed-rank", "ranks", "a rank that dies is named", Need.TWO_RANKS),
    _check("trace", "ranks", "a traced run beside its plan", Need.TWO_RANKS, 900),
    _check("encoders", "encoders", "samples a second of frozen encoders", limit_s=600),
)
