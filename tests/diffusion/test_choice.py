"""Diffusion-process flags: a new process, or changes of an existing one."""

import argparse
import json

import pytest

from megatron_pulse.dataclass_flags import add_flags, read_flags
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import (
    OF_TRAINING,
    DynamicShift,
    ProcessChoice,
    TimeShift,
    parse_shift,
)
from megatron_pulse.diffusion.process_from_flags import chosen_process


def choice(*flags):
    """Choice given by training flags."""
    parser = argparse.ArgumentParser()
    add_flags(ProcessChoice, parser, "pulse-", unsaid="new")
    return read_flags(ProcessChoice, parser.parse_args(list(flags)), "pulse-")


def described(*flags, base=None):
    return chosen_process(choice(*flags), base).describe()


def test_nothing_said():
    assert not choice().said
    assert described() == "flow, shift 1, times logit_normal(0, 1), 1000 timesteps"
    base = DiffusionProcess("v", "linear", beta_end=0.03, zero_terminal_snr=True)
    assert chosen_process(ProcessChoice(), base) == base


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--pulse-objective epsilon", "epsilon, scaled_linear betas 0.00085 to 0.012, 1000"),
        (
            "--pulse-objective v --pulse-noise-schedule linear --pulse-beta-end 0.03",
            "v, linear betas 0.0001 to 0.03, 1000",
        ),
        ("--pulse-objective v --pulse-noise-schedule cosine", "v, cosine betas, 1000"),
        (
            "--pulse-objective sample --pulse-beta-start 0.001 --pulse-zero-terminal-snr",
            "sample, scaled_linear betas 0.001 to 0.012, zero terminal SNR, 1000",
        ),
        (
            "--pulse-flow-shift 3 --pulse-num-timesteps 50",
            "flow, shift 3, times logit_normal(0, 1), 50",
        ),
        (
            "--pulse-flow-shift dynamic --pulse-logit-mean 0.5 --pulse-logit-std 2",
            "flow, shift dynamic:0.5,1.15,256,4096, times logit_normal(0.5, 2), 1000",
        ),
        ("--pulse-timestep-density uniform", "flow, shift 1, times uniform, 1000"),
    ],
)
def test_a_new_process(flags, expected):
    assert described(*flags.split()) == f"{expected} timesteps"


def test_betas_of_a_file(tmp_path):
    path = tmp_path / "betas.json"
    path.write_text(json.dumps([0.1, 0.2, 0.5]))
    process = chosen_process(choice("--pulse-objective", "v", "--pulse-trained-betas", str(path)))
    assert process.trained_betas == (0.1, 0.2, 0.5) and process.num_timesteps == 3
    assert described("--pulse-noise-schedule", "cosine", "--pulse-num-timesteps", "1000",
                     base=process) == "v, cosine betas, 1000 timesteps"  # fmt: skip
    for text, words in (
        ("[0.1, true]", "not a list of numbers"),
        ("[0.1, 2.0]", "between 0 and 1"),
        ("[0.1, NaN]", "betas.json.*number nan"),
        ("{", "betas.json"),
        ("[" * 100_000, "betas.json.*deep"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            chosen_process(choice("--pulse-objective", "v", "--pulse-trained-betas", str(path)))
    with pytest.raises(ValueError, match="nowhere"):
        chosen_process(choice("--pulse-objective", "v", "--pulse-trained-betas", "nowhere"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--pulse-noise-schedule cosine", "flow has no noise schedule"),
        ("--pulse-zero-terminal-snr", "flow has no noise schedule"),
        ("--pulse-objective v --pulse-flow-shift 3", "only for flow"),
        ("--pulse-objective v --pulse-timestep-density logit_normal", "only for flow"),
        ("--pulse-objective epsilon --pulse-zero-terminal-snr", "zero signal"),
        ("--pulse-objective v --pulse-noise-schedule cosine --pulse-beta-end 0.1", "has none"),
        ("--pulse-objective v --pulse-beta-end 1.5", "0 < beta_start"),
        ("--pulse-objective v --pulse-beta-end nan", "0 < beta_start"),
        ("--pulse-flow-shift -1", "must be positive"),
        ("--pulse-flow-shift inf", "must be positive"),
        ("--pulse-flow-shift dynamic:1,2,9,3", "must be larger"),
        ("--pulse-flow-shift dynamic:0,2,9,30,linear", "positive at both ends"),
        (
            "--pulse-timestep-density uniform --pulse-logit-mean 1",
            "only for the density logit_normal",
        ),
        ("--pulse-logit-std 0", "logit_std"),
        ("--pulse-num-timesteps 1", "num_timesteps"),
    ],
)
def test_what_does_not_go_together(flags, words):
    with pytest.raises(ValueError, match=words):
        chosen_process(choice(*flags.split()))


def test_what_depends_on_a_change_is_new():
    base = DiffusionProcess("v", "linear", 500, beta_end=0.03)
    assert described("--pulse-noise-schedule", "scaled_linear", base=base) == (
        "v, scaled_linear betas 0.00085 to 0.012, 500 timesteps"
    )
    assert described("--pulse-noise-schedule", "linear", base=base) == base.describe()
    flow = "flow, shift 1, times logit_normal(0, 1), 500 timesteps"
    assert described("--pulse-objective", "flow", base=base) == flow
    karras = DiffusionProcess("v", scheduler={"_class_name": "EulerDiscreteScheduler"})
    assert chosen_process(choice("--pulse-objective", "epsilon"), karras).scheduler
    assert not chosen_process(choice("--pulse-objective", "flow"), karras).scheduler
    own = DiffusionProcess("flow", shift=DynamicShift(0.4, 2.0, 64, 900))
    assert chosen_process(choice("--pulse-flow-shift", "dynamic"), own) == own


def test_shifts_as_text():
    linear = DynamicShift(0.4, 2.0, 64, 900, TimeShift.LINEAR)
    for shift in (DynamicShift(), linear):
        assert parse_shift(str(shift)) == shift
    assert parse_shift("2.5") == 2.5
    for text in ("", "dynamic:", "dynamic:1,2,3", "dynamic:1,2,3,4,5", "dynamic:a,b,c,d", "much"):
        with pytest.raises(ValueError, match="neither"):
            parse_shift(text)


def test_one_set_of_options_for_all(capsys):
    from megatron_pulse.cli.main import main

    seen = {}
    for command in ("import", "sample"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        seen[command] = capsys.readouterr().out
    for name in ProcessChoice().__dict__:
        flag = "--" + name.replace("_", "-")
        assert flag in seen["import"]
        drawn = name in OF_TRAINING
        assert (flag in seen["sample"]) != drawn, flag
