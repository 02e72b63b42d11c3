"""Megatron's flags: the table holds all of them, and what is given is done or refused."""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_pulse.cli.main import main as pulse
from megatron_pulse.integration.flags.megatron_flags import FILE, Support, load_table
from megatron_pulse.integration.flags.parse import Parser, parse
from megatron_pulse.integration.flags.startup_checks import FlagError
from tests.integration.flag_trials import TRIALS, Losses, Trial, try_all
from tests.integration.runs import BASE, TINY

GOOD = [*TINY["uvit"], *BASE, "--global-batch-size", "8", "--train-iters", "3"]


@functools.cache
def of_megatron() -> dict[str, tuple[str, argparse.Action]]:
    """Every flag of the installed Megatron's parser by its first name, with its group."""
    parser = add_megatron_arguments(argparse.ArgumentParser())
    return {
        action.option_strings[0]: (str(group.title), action)
        for group in parser._action_groups
        for action in group._group_actions
        if action.dest != "help"
    }


def refused(monkeypatch: pytest.MonkeyPatch, *flags: str) -> list[str]:
    """Error of a run with these flags."""
    from megatron_pulse.integration.setup import prepare, read_command_line

    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["pretrain_diffusion.py", *GOOD, *flags])
    with pytest.raises(FlagError) as error:
        prepare(*read_command_line())
    return error.value.faults


def test_the_table_holds_the_flags_of_the_installed_megatron() -> None:
    flags, table = of_megatron(), load_table()
    assert list(table) == list(flags), "megatron.txt and Megatron's parser differ"
    assert {name: flag.group for name, flag in table.items()} == {
        name: group for name, (group, _) in flags.items()
    }
    lines = [line.split()[:2] for line in FILE.read_text().splitlines()]
    words = Counter(line[1].partition("=")[0] for line in lines if line and line[0] in set(Support))
    assert set(words.values()) == {1}, "a flag is in the table twice"


def test_what_is_needed_are_flags_that_work() -> None:
    table, text = load_table(), FILE.with_name("constraints.txt").read_text()
    named = re.findall(r"--[\w-]+", text)
    assert len(named) > 100
    assert [name for name in named if table[name].standing is not Support.WORKS] == []


def test_values_that_work_are_values() -> None:
    for name, flag in load_table().items():
        choices = of_megatron()[name][1].choices
        if flag.values and choices is not None:
            assert set(flag.values) <= set(map(str, choices)), name


def test_every_reason_is_used() -> None:
    text = FILE.read_text()
    reasons = re.findall(r"^(\w+) ", text[text.index("[reasons]") : text.index("[trans")], re.M)
    assert len(reasons) > 20
    for reason in reasons:
        assert f" @{reason}\n" in text, reason


def test_every_flag_that_works_is_tried() -> None:
    aliases = {
        alias: name
        for name, (_, action) in of_megatron().items()
        for alias in action.option_strings
    }
    given = {aliases[name] for trial in TRIALS for name in trial.names() if name in aliases}
    given |= {aliases[word] for word in GOOD if word in aliases}
    works = {name for name, flag in load_table().items() if flag.standing is Support.WORKS}
    assert works - given == set(), "no trial gives these"
    assert given - works == set(), "these are tried, but the table says that they do not work"


def test_every_flag_that_does_not_work_is_refused_when_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them on one command line: a fault for each, in its own words."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    parser, words, expected = Parser(), [], []
    for name, flag in load_table().items():
        if flag.standing is Support.WORKS:
            continue
        action = parser._option_string_actions[name]
        words += [name, *some_values(action)]
        expected.append((name, flag.note))
    faults = parse([*GOOD, *words]).faults
    assert len(faults) == len(expected) > 600
    for (name, note), fault in zip(expected, faults, strict=True):
        assert fault.startswith(f"{name} ") and note in fault


def some_values(action: argparse.Action) -> list[str]:
    """Words that ``action`` takes and that change its value."""
    if action.nargs == 0:
        return []
    count = action.nargs if isinstance(action.nargs, int) else 1
    if action.choices:
        names = [getattr(choice, "name", str(choice)) for choice in action.choices]
        return [next(name for name in names if name != str(action.default))] * count
    for text in ("7", "0.37", "attn", "x"):
        try:
            action.type(text) if callable(action.type) else None
        except (ValueError, TypeError, KeyError, argparse.ArgumentTypeError, AssertionError):
            continue
        return [text] * count
    raise AssertionError(action)


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--num-layers", "12"], "--num-layers has no effect here"),
        (["--num-layers=12"], "--num-layers has no effect here"),
        (["--disable-mamba-mem-eff-path"], "--disable-mamba-mem-eff-path has no effect"),
        (["--no-rl-partial-rollouts"], "--no-rl-partial-rollouts has no effect here"),
        (["--seq-length", "64"], "--seq-length has no effect here"),
        (["--yaml-cfg", "/does/not/exist.yaml"], "--yaml-cfg /does/not/exist.yaml cannot be used"),
        (["--enable-msc"], "--enable-msc cannot be used"),
        (["--optimizer", "soap"], "--optimizer soap: its state is not planned for. Give muon"),
        (["--recompute-granularity", "full", "--recompute-num-layers", "2"], "layers 2 cannot"),
        (["--optimizer", "sgd", "--use-distributed-optimizer"], "--optimizer sgd cannot be used"),
        (["--transformer-impl", "transformer_engine"], "its layers need GPUs"),
        (["--distributed-backend", "nccl"], "torch finds no GPU here; leave it out"),
        (["--num-workers", "1000000"], "cores of this machine. Give"),
        (
            ["--ckpt-fully-parallel-load"],
            "load-exchange-algo gather_object",
        ),
        (["--fp16", "--bf16"], "exclude each other"),
        (["--pulse-sdc-check-interval", "5"], "--pulse-sdc-check-interval needs a second rank"),
        (["--loss-scale", "128"], "--loss-scale was given without --fp16"),
        (
            ["--fp16", "--initial-loss-scale", "0.5", "--min-loss-scale", "4"],
            "--min-loss-scale 4 is above --initial-loss-scale 0.5, the initial loss scale",
        ),
        (["--fp16", "--min-loss-scale", "1e10"], "is above the default --initial-loss-scale 4.29"),
        (
            ["--fp16", "--loss-scale", "8", "--hysteresis", "1"],
            "--hysteresis excludes --loss-scale, which fixes the loss scale",
        ),
        (["--lr", "nan"], "--lr is nan; it must be finite, above 0"),
        (["--lr", "inf"], "--lr is inf; it must be finite, above 0"),
        (
            ["--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "9"],
            "--lr-wsd-decay-iters 9 is above 3, the length of",
        ),
        (["--lr-wsd-decay-iters", "0"], "--lr-wsd-decay-iters is 0; it must be 1 or more"),
        (["--min-lr", "1e-5"], "--min-lr was given without --lr-decay-style"),
        (["--lr-warmup-iters", "3"], "--lr-warmup-iters 3 must be below 3"),
        (["--lr-warmup-samples", "3"], "--lr-warmup-samples was given without --train-samples"),
        (["--train-samples", "24"], "exclude each other: give one"),
        (["--lr-decay-style", "WSD"], "needs --lr-wsd-decay-iters"),
        (["--weight-decay-incr-style", "linear"], "needs --start-weight-decay and --end"),
        (["--profile", "--use-pytorch-profiler"], "was given without --tensorboard-dir"),
        (["--log-interval", "0"], "--log-interval is 0; it must be 1 or more"),
        (["--sequence-parallel"], "without --tensor-model-parallel-size 2 or more"),
        (["--no-overlap-p2p-communication"], "the plan decides the order of messages"),
    ],
)
def test_refused_before_the_start(
    flags: list[str], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = refused(monkeypatch, *flags)
    assert any(fault in one for one in faults), faults


def test_what_megatron_itself_refuses_is_said_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lean = "--distrib-optim-fully-reshardable-mem-efficient"
    (fault,) = refused(
        monkeypatch, "--use-distributed-optimizer", lean, "--disable-gloo-process-groups"
    )
    assert fault.startswith("Megatron refuses these flags: ") and lean in fault


def test_faults_of_all_kinds_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = refused(
        monkeypatch, "--hidden-size", "64", "--adam-beta1", "2", "--pulse-data", "cifar"
    )
    assert len(faults) == 3, faults


def test_a_value_that_the_run_has_anyway_is_fine() -> None:
    same = ["--attention-dropout", "0", "--context-parallel-size", "1", "--cuda-graph-impl", "none"]
    line = parse([*GOOD, *same, "--ckpt-format", "torch_dist", "--dataloader-type", "external"])
    assert line.faults == ()
    assert "--attention-dropout" in line.given


def test_a_typing_error_gets_one_line_and_a_suggestion() -> None:
    for words, said in (
        (["--train-iter", "5"], "there is no flag --train-iter: did you mean --train-iters?"),
        (["--pulse-bakbone=uvit-s"], "did you mean --pulse-backbone?"),
        (["--zzz"], "there is no flag --zzz: --help lists the supported flags"),
        (["--lr", "fast"], "--lr: invalid float value: 'fast'"),
        (["--optimizer", "adamw"], "--optimizer adamw: its name here is adam"),
    ):
        (fault,) = parse([*GOOD, *words]).faults
        assert said in fault and "\n" not in fault


def test_a_flag_that_is_newer_than_the_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_pulse.integration.flags import parse as module

    def newer(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        add_megatron_arguments(parser).add_argument("--brand-new", action="store_true")
        return parser

    monkeypatch.setattr(module, "add_megatron_arguments", newer)
    (fault,) = parse([*GOOD, "--brand-new"]).faults
    assert fault.startswith("--brand-new cannot be used: it is newer")
    assert "--brand-new" not in Parser().format_help()


def test_help_shows_what_works() -> None:
    text = Parser().format_help()
    assert "--pulse-plan" in text and "--clip-grad" in text
    assert "--num-layers" not in text and "--muon-momentum" not in text
    assert len(text.splitlines()) < 800
    assert re.search(r"'pulse\s+flags'\s+explains\s+why\s+the\s+other\s+\d+\s+flags", text)


def test_the_command_lists_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert pulse(["flags", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed] == list(load_table())
    assert pulse(["flags", "--standing", "refused", "--group", "profiling"]) == 0
    out = capsys.readouterr().out
    assert "--nvtx-ranges" in out and "--use-pytorch-profiler  " not in out
    assert pulse(["flags", "optimizer", "--standing", "works"]) == 0
    assert "--use-distributed-optimizer" in capsys.readouterr().out
    assert pulse(["flags", "--group", "profilng"]) == 2
    assert "profiling" in capsys.readouterr().err


def test_the_readme_counts_them() -> None:
    counts = Counter(flag.standing for flag in load_table().values())
    text = (Path(__file__).parents[2] / "launch/README.md").read_text()
    said = re.search(r"Of Megatron's (\d+) flags (\d+) work", text)
    assert said and [int(n) for n in said.groups()] == [
        len(load_table()),
        counts[Support.WORKS],
    ]


SAMPLE = (
    Trial(
        "--pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping --recompute-granularity full "
        "--num-workers 1 --eval-micro-batch-size 1 --eval-interval 2 --exit-signal-handler "
        "--save {out}/s --save-interval 2 --save-params-interval 1 --save-wgrads-interval 2 "
        "--verify-integrity --deterministic-mode --config-logger-dir {out}/c --manual-gc "
        "--log-num-zeros-in-grad --log-memory-interval 1 --timing-log-level 2 "
        "--tensorboard-dir {out}/t --log-timers-to-tensorboard --logging-level 20",
        2,
        says="optimizer-inner-step",
        writes="s/iter_0000002/metadata.json",
    ),
    Trial(
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--ddp-bucket-size 1000 --ddp-average-in-collective "
        "--check-weight-hash-across-dp-replicas-interval 1 --no-ckpt-fully-parallel-save "
        "--disable-gloo-process-groups --save {out}/s --distributed-timeout-minutes 5",
        2,
        writes="s/iter_0000003/metadata.json",
    ),
    Trial(
        "--fp16 --initial-loss-scale 256 --loss-scale-window 2 --hysteresis 1 --optimizer sgd "
        "--lr-warmup-iters 1 --lr-decay-style cosine --min-lr 1e-4 --log-params-norm",
        losses=Losses.OTHER,
        says="loss scale 512",
    ),
)


def test_a_sample_of_trials() -> None:
    """Every trial by itself: ``python -m tests.benchmarks.flags``."""
    for trial, faults in try_all(SAMPLE):
        assert not faults, (trial, faults)
