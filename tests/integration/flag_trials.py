"""A real run for every flag of Megatron's that works, and what can be seen of its effect.

Each trial trains a tiny U-ViT on real digits for three steps, on forked ranks.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tests.integration.runs import BASE, TINY, train
from tests.ranks import RanksFailed, run_ranks

STEPS = ["--global-batch-size", "8", "--train-iters", "3"]
SAMPLES = ["--global-batch-size", "8"]


class Losses(Enum):
    """Relation of the losses of a trial to those of a run without its flags."""

    SAME = "same"
    OTHER = "other"
    ANY = "any"


@dataclass(frozen=True)
class Trial:
    """``flags`` on ``ranks`` processes; ``{out}`` is a new folder.

    ``first`` is run before, in the same folder. ``says`` must be in the log of some rank;
    ``writes`` is a pattern of a file that must be below the folder afterwards.
    """

    flags: str
    ranks: int = 1
    losses: Losses = Losses.SAME
    says: str = ""
    writes: str = ""
    first: str | None = None
    backbone: str = "uvit"

    def names(self) -> set[str]:
        """The flags it tries."""
        words = shlex.split(f"{self.first or ''} {self.flags}")
        return {word for word in words if word.startswith("--")}


SAME, OTHER, ANY = Losses
_SAVE = "--save {out}/s --save-interval 3"
_LOAD = "--load {out}/s --train-iters 5"
_LONG = "--save {out}/s --train-iters 5 --exit-interval 3 --save-interval 3"
_PROFILE = "--profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 2"
_PROFILE += " --tensorboard-dir {out}/t/board"
_SHARED = "--use-distributed-optimizer"
_HOST = f"{_SHARED} --optimizer-cpu-offload"

TRIALS: tuple[Trial, ...] = (
    Trial("--use-torch-fsdp2", ranks=2, says="FSDP2 over 2 ranks"),
    Trial("--tensor-model-parallel-size 2", 2),
    Trial(
        "--context-parallel-size 2", 2, ANY, says="context-parallel ranks send", backbone="tokens"
    ),
    Trial("--tensor-model-parallel-size 2 --sequence-parallel", 2),
    Trial("--pipeline-model-parallel-size 2", 2),
    Trial("--pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping", 4),
    Trial("--use-cpu-initialization --no-gradient-accumulation-fusion --no-rope-fusion"),
    Trial("--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion"),
    Trial("--no-bias-dropout-fusion --no-persist-layer-norm --disable-jit-fuser"),
    Trial("--transformer-impl local --ckpt-format torch_dist --rerun-mode disabled"),
    Trial("--no-one-logger --disable-msc --distributed-backend gloo"),
    Trial(
        "--fp16 --initial-loss-scale 1024 --min-loss-scale 1", losses=OTHER, says="scale: 1024.0"
    ),
    Trial("--fp16 --loss-scale 128", losses=OTHER, says="loss scale 128"),
    Trial(
        "--fp16 --initial-loss-scale 256 --loss-scale-window 2 --hysteresis 1",
        losses=OTHER,
        says="loss scale 512",
    ),
    Trial("--bf16", losses=OTHER),
    Trial("--bf16 --accumulate-allreduce-grads-in-fp32", 2, OTHER),
    Trial("--bf16 --grad-reduce-in-bf16", 2, OTHER),
    Trial("--bf16 --disable-bf16-reduced-precision-matmul", losses=OTHER),
    Trial("--deterministic-mode"),
    Trial("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    Trial("--recompute-granularity selective"),
    Trial("--config-logger-dir {out}/c", writes="c/*.json"),
    Trial("--weight-decay 0.5", losses=OTHER),
    Trial("--apply-wd-to-qk-layernorm --weight-decay 0.5", losses=OTHER),
    Trial(
        "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.5",
        losses=OTHER,
    ),
    Trial("--clip-grad 0.01", losses=OTHER),
    Trial("--adam-beta1 0.5", losses=OTHER),
    Trial("--adam-beta2 0.5", losses=OTHER),
    Trial("--adam-eps 1e-2", losses=OTHER),
    Trial("--optimizer sgd --sgd-momentum 0.1", losses=OTHER),
    Trial(f"{_PROFILE} --profile-ranks 0", writes="t/torch_profile/rank-0.json.gz"),
    Trial(f"{_PROFILE} --pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack"),
    Trial(f"{_PROFILE} --pytorch-profiler-collect-chakra", writes="t/chakra/*"),
    Trial("--record-memory-history --memory-snapshot-path {out}/m.pickle", writes="m.pickle"),
    Trial("--micro-batch-size 4"),
    Trial("--global-batch-size 4", losses=OTHER),
    Trial("--empty-unused-memory-level 2"),
    Trial("--check-weight-hash-across-dp-replicas-interval 1", 2),
    Trial("--train-sync-interval 1"),
    Trial("--train-samples 24"),
    Trial("--train-iters 5 --exit-interval 3", says="exiting program at iteration 3"),
    Trial("--exit-duration-in-mins 1"),
    Trial("--exit-signal-handler --exit-signal SIGUSR1"),
    Trial("--manual-gc --manual-gc-interval 1 --no-manual-gc-eval"),
    Trial("--no-check-for-nan-in-loss-and-grad --check-for-large-grads"),
    Trial("--dump-param-to-param-group-map {out}/map", writes="map/*.distcp"),
    Trial("--seed 7", losses=OTHER),
    Trial("--lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-decay-iters 3", losses=OTHER),
    Trial("--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 3", losses=OTHER),
    Trial(
        "--train-samples 24 --lr-decay-style WSD --lr-decay-samples 24 --lr-wsd-decay-samples 16 "
        "--lr-warmup-samples 8",
        losses=OTHER,
    ),
    Trial("--lr-warmup-fraction 0.5", losses=OTHER),
    Trial("--lr-warmup-iters 2 --lr-warmup-init 1e-5", losses=OTHER),
    Trial("--save {out}/s --persistent-save-interval 2", writes="s/iter_0000002/metadata.json"),
    Trial(
        "--save {out}/s --save-interval 1 --save-retain-interval 2",
        writes="s/iter_0000002/metadata.json",
    ),
    Trial(f"{_SAVE} --save-params-interval 1", writes="s/*params*/*"),
    Trial(f"{_SAVE} --save-wgrads-interval 2", writes="s/*wgrads*/*"),
    Trial(
        "--save {out}/s --non-persistent-save-interval 2 --non-persistent-ckpt-type global "
        "--non-persistent-global-ckpt-dir {out}/n",
        writes="n/iter_0000002/metadata.json",
    ),
    Trial(
        f"{_SHARED} --save {{out}}/s --no-ckpt-fully-parallel-save", 2, writes="s/iter_0000003/*"
    ),
    Trial("--save {out}/s --save-interval 1 --ckpt-assume-constant-structure"),
    Trial(
        "--save {out}/s --save-interval 1 --async-save --async-strategy mcore "
        "--save-retain-interval 2 --ckpt-assume-constant-structure",
        2,
        writes="s/iter_0000003/metadata.json",
    ),
    Trial("--save {out}/s --no-save-optim --no-save-rng", writes="s/iter_0000003/metadata.json"),
    Trial(_LOAD, first=_LONG, losses=ANY, says="iteration        5/"),
    Trial(
        f"{_LOAD} --exit-on-missing-checkpoint --dist-ckpt-strictness raise_all",
        first=_LONG,
        losses=ANY,
        says="iteration        5/",
    ),
    Trial(
        f"{_LOAD} --verify-integrity --no-ckpt-load-validate-sharding-integrity",
        first=f"{_LONG} --verify-integrity",
        losses=ANY,
        says="iteration        5/",
    ),
    Trial(
        f"{_LOAD} --no-load-optim --no-load-rng --load-main-params-from-ckpt",
        first=_LONG,
        losses=ANY,
        says="iteration        5/",
    ),
    Trial("--load {out}/s --finetune", first=_SAVE, losses=OTHER, says="iteration        1/"),
    Trial("--pretrained-checkpoint {out}/s", first=_SAVE, losses=OTHER, says="iteration        1/"),
    Trial("--load {out}/s --ckpt-step 2", first="--save {out}/s --save-interval 1", losses=ANY),
    Trial(f"{_LOAD} --override-opt-param-scheduler", first=_LONG, losses=ANY),
    Trial(f"{_LOAD} --use-checkpoint-opt-param-scheduler", first=_LONG, losses=ANY),
    Trial(
        f"{_LOAD} --override-ckpt-iteration 1",
        first=_LONG,
        losses=ANY,
        says="iteration        2/",
    ),
    Trial(
        f"{_SHARED} {_LOAD} --ckpt-fully-parallel-load "
        "--ckpt-fully-parallel-load-exchange-algo gather_object",
        2,
        first=f"{_SHARED} {_LONG} --dist-ckpt-optim-fully-reshardable",
        losses=ANY,
        says="iteration        5/",
    ),
    Trial(
        f"{_SHARED} {_LOAD} --distrib-optim-fully-reshardable-mem-efficient",
        2,
        first=f"{_SHARED} {_LONG} --distrib-optim-fully-reshardable-mem-efficient",
        losses=ANY,
        says="iteration        5/",
    ),
    Trial("--distributed-timeout-minutes 5 --distributed-timeout-seconds-after-init 200", 2),
    Trial(f"{_SHARED} --disable-gloo-process-groups", 2),
    Trial("--overlap-grad-reduce --no-align-grad-reduce --ddp-num-buckets 3", 2),
    Trial("--overlap-grad-reduce --ddp-bucket-size 1000", 2),
    Trial(
        f"{_SHARED} --overlap-grad-reduce --overlap-param-gather --no-align-param-gather",
        2,
    ),
    Trial(f"{_SHARED} --ddp-pad-buckets-for-high-nccl-busbw --ddp-average-in-collective", 2),
    Trial(
        f"{_SHARED} --bf16 --grad-reduce-in-bf16 --ddp-reduce-scatter-with-fp32-accumulation",
        2,
        OTHER,
    ),
    Trial(f"{_HOST} --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer", 2),
    Trial(f"{_HOST} --no-pin-cpu-grads --no-pin-cpu-params --save {{out}}/s", writes="s/iter*3/*"),
    Trial("--no-gradient-reduce-div-fusion", 2),
    Trial(
        "--eval-interval 1 --start-eval-at-iter 2 --eval-iters 2 --eval-global-batch-size 4 "
        "--eval-micro-batch-size 1",
        says="validation loss at iteration 2",
    ),
    Trial("--pipeline-model-parallel-size 2 --eval-micro-batch-size 1", 2),
    Trial("--skip-train", losses=ANY, says="validation loss at iteration 0"),
    Trial("--num-workers 2"),
    Trial("--log-interval 2 --log-params-norm --log-num-zeros-in-grad", says="params norm"),
    Trial(
        "--timing-log-level 2 --timing-log-option all --no-barrier-with-level-1-timing",
        says="optimizer-inner-step",
    ),
    Trial(
        "--tensorboard-dir {out}/t --tensorboard-log-interval 2 --tensorboard-queue-size 5 "
        "--log-timers-to-tensorboard --no-log-loss-scale-to-tensorboard "
        "--log-memory-to-tensorboard --log-world-size-to-tensorboard",
        writes="t/events*",
    ),
    Trial("--log-memory-interval 1 --log-throughput", says="memory (MB)"),
    Trial("--logging-level 20"),
    Trial(
        "--wandb-project p --wandb-exp-name e --wandb-save-dir {out}/w --wandb-entity x "
        "--tensorboard-dir {out}/t",
        writes="w",
    ),
)


@dataclass(frozen=True)
class Outcome:
    """Losses of training and evaluation of the last rank, and what all ranks said."""

    losses: list[float | None]
    log: str


def run_trial(trial: Trial) -> tuple[Outcome, list[str]]:
    """The trial's outcome and what is wrong with it; raises RanksFailed if a rank ends badly."""
    with tempfile.TemporaryDirectory() as folder:
        for flags in (trial.first, trial.flags):
            if flags is not None:
                outcome = _run(trial, shlex.split(flags.replace("{out}", folder)))
        return outcome, list(_faults(trial, outcome, Path(folder)))


def baseline() -> Outcome:
    """Result of a run without a trial's flags, at any layout."""
    return _run(Trial(""), [])


def _run(trial: Trial, flags: list[str]) -> Outcome:
    steps = SAMPLES if "--train-samples" in flags else STEPS
    argv = [*TINY[trial.backbone], *BASE, *steps, *flags]
    results = run_ranks(trial.ranks, _rank, argv, timeout_s=120)
    log = "".join(result["log"] for result in results)
    return Outcome(results[-1]["losses"], log)


def _rank(argv: list[str]) -> dict[str, Any]:
    seen = train(argv)
    sys.stdout.flush()
    log = Path(os.readlink("/proc/self/fd/1")).read_text()
    return {"losses": seen["losses"], "log": log}


def _faults(trial: Trial, outcome: Outcome, folder: Path) -> Iterator[str]:
    if "Traceback" in outcome.log:
        yield "there is a traceback in the log"
    if trial.says not in outcome.log:
        yield f"the log does not say {trial.says!r}"
    if trial.writes and not list(folder.glob(trial.writes)):
        yield f"there is no {trial.writes}"


def compare(trial: Trial, outcome: Outcome, expected: Outcome) -> list[str]:
    """Faults of the losses of a trial."""
    if trial.losses is Losses.ANY:
        return []
    pairs = list(zip(outcome.losses, expected.losses, strict=False))
    close = len(outcome.losses) == len(expected.losses) and all(
        a is not None and b is not None and abs(a - b) <= 1e-6 * abs(b) for a, b in pairs
    )
    if close == (trial.losses is Losses.SAME):
        return []
    return [f"losses {outcome.losses} are not {trial.losses.value} as {expected.losses}"]


def try_all(trials: tuple[Trial, ...]) -> Iterator[tuple[Trial, list[str]]]:
    """Every trial and what is wrong with it."""
    expected = baseline()
    for trial in trials:
        try:
            outcome, faults = run_trial(trial)
        except RanksFailed as error:
            yield trial, [str(error)]
        else:
            yield trial, [*faults, *compare(trial, outcome, expected)]
