"""Encoders in the loop, before steps and in pipeline bubbles: the same run in every layout."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file

from megatron_pulse.cli.main import main
from megatron_pulse.integration.flags.pulse_options import PulseOptions
from megatron_pulse.planner.layout.layouts import FOLD_EXACT, FOLD_SOFT, ROW, WHOLE
from megatron_pulse.planner.tune.config import Config, Recompute
from model_specs import load_backbone
from tests.cli.test_data import make_vae
from tests.data.captioned import captioned_digits
from tests.encoders.pipelines import LENGTH, make_encoder, make_pipeline
from tests.integration.runs import (
    BASE,
    STEPS,
    TEXT,
    TINY,
    Run,
    alone,
    assert_equal_to_rounding,
    assert_same,
    pipeline,
    run,
)
from tests.integration.test_bad_input import refuse
from tests.integration.test_cascade import require_each
from tests.integration.test_plans import make_plan
from tests.reference import unsealed_record

READS = [
    *TEXT,
    "--pulse-option", "in_channels=2", "--pulse-option", "out_channels=2",
    "--pulse-option", "sample_size=4", "--pulse-option", f"context_length={LENGTH}",
]  # fmt: skip

DROPS = ["--pulse-class-dropout", "0.4", "--pulse-encoder-dropout", "text_encoder=0.3"]
OPTIONS = dict(flag.split("=") for flag in (*TINY["unet"], *READS) if "=" in flag)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline whose encoders make what ``READS`` reads."""
    root = make_pipeline(tmp_path_factory.mktemp("sd"), ("clip", 16, 16))
    make_vae(
        root / "vae", in_channels=1, out_channels=1, block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        scaling_factor=0.5,
    )  # fmt: skip
    return root


@pytest.fixture(scope="module")
def flags(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = captioned_digits(tmp_path_factory.mktemp("digits"))
    return [*STEPS, *READS, "--pulse-data", data, *DROPS, "--pulse-encoders", str(folder)]


@pytest.fixture(scope="module")
def costs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("costs") / "encoders.json"
    options = [f"--option={name}={value}" for name, value in OPTIONS.items()]
    argv = ["profile", "--backbone", "sd-tiny", *options, "--encoders", str(folder)]
    assert main([*argv, "-o", str(file), "--device", "cpu"]) == 0
    return file


@pytest.fixture(scope="module")
def expected(flags: list[str]) -> Run:
    """Run of one process that encodes before each step."""
    return run(1, *flags, backbone="unet")


def test_in_front_of_every_layout(flags: list[str], expected: Run) -> None:
    assert_same(run(2, *flags, *pipeline(2), backbone="unet"), expected)


@pytest.mark.parametrize(
    "config",
    [
        Config(2, 1, 1, 2, FOLD_EXACT, split=True),
        Config(2, 1, 1, 2, ROW, recompute=Recompute.ALWAYS),
        Config(4, 1, 1, 2, FOLD_SOFT),
    ],
    ids=["split-fold", "recomputed-sequence", "four"],
)
def test_in_idle_time(
    config: Config, flags: list[str], costs: Path, expected: Run, tmp_path: Path
) -> None:
    plan = make_plan(tmp_path / "plan.json", config, "sd-tiny", OPTIONS, costs)
    bubble_tasks = json.loads(plan.read_text())["schedule"]["bubble_tasks"]
    assert [task["name"] for task in bubble_tasks] == ["text_encoder", "vae"]
    given = flags[len(STEPS + READS) :]
    obeyed = ["--pulse-plan", str(plan), *STEPS[2:]]
    got = run(config.pipeline, *given, *obeyed, backbone="none")
    assert {"X", *("R" if config.recompute else "")} <= got.executed.operations
    assert_same(got, expected)


def test_chains_of_a_cascade_encode_as_they_do_alone(
    folder: Path, flags: list[str], expected: Run, tmp_path: Path
) -> None:
    """Cascade of two chains; prompts are drawn with the encoders of one."""

    def options(chain: str, *given: str) -> list[str]:
        return [word for g in given if "=" in g for word in ("--pulse-option", f"{chain}.{g}")]

    source = flags[flags.index("--pulse-data") + 1]
    cascade = [
        "--pulse-backbone", "cascade:base=sd-tiny,upper=unet-tiny", *STEPS, *DROPS,
        *options("base", *TINY["unet"], *READS), *options("upper", *TINY["unet"]),
        "--pulse-data", f"base={source},upper=digits8", "--pulse-encoders", f"base={folder}",
    ]  # fmt: skip
    kept = ["--save", str(tmp_path / "kept")]
    got = run(2, *cascade, *kept, *pipeline(2), backbone="none")
    require_each(got, {"base": expected, "upper": alone(*STEPS, *DROPS[:2], backbone="unet")})
    argv = ["sample", "--load", str(tmp_path / "kept"), "--chain", "base", "--steps", "2"]
    argv += ["--prompt", "a red bird", "--per-class", "1", "-o"]
    assert main([*argv, str(tmp_path / "a.png")]) == 0
    assert main([*argv, str(tmp_path / "b.png"), "--encoders", str(folder)]) == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_goes_on_in_the_middle(
    folder: Path,
    flags: list[str],
    costs: Path,
    expected: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run that goes on encodes its first batch in front, and then fills again; two replicas.
    Prompts are drawn with its encoders."""
    config = Config(1, 2, 1, 2, WHOLE, distributed_optimizer=True)
    plan = make_plan(tmp_path / "plan.json", config, "sd-tiny", OPTIONS, costs)
    given = [*flags[len(STEPS + READS) :], "--pulse-plan", str(plan), *STEPS[2:]]
    given += ["--save", str(tmp_path / "kept"), "--save-interval", "1"]
    first = run(2, *given, "--exit-interval", "1", backbone="none")
    again = run(2, *given, backbone="none")
    joined = replace(
        again, losses=first.losses + again.losses, grad_norms=first.grad_norms + again.grad_norms
    )
    assert_equal_to_rounding(joined, expected)

    def sample(name: str, *more: str) -> int:
        argv = ["sample", "--load", str(tmp_path / "kept"), "-o", str(tmp_path / name)]
        return main([*argv, "--prompt", "a red bird", "--steps", "2", "--per-class", "2", *more])

    assert sample("a.png") == 0 and sample("b.png", "--encoders", str(folder)) == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    other = make_pipeline(tmp_path / "other", ("clip", 16, 15))
    assert sample("c.png", "--encoders", str(other), "--vae", str(folder / "vae")) == 2
    said = capsys.readouterr().err
    assert re.search(
        r"other: text_encoder is (sha256:\w+), but the model was .* sha256:(?!\1)", said
    )
    moved = folder.rename(tmp_path / "moved")
    try:
        assert sample("c.png") == 2 and "give its new place" in capsys.readouterr().err
        shutil.copytree(moved, folder)
        make_encoder("clip", 16, 16).save_pretrained(folder / "text_encoder")
        assert sample("c.png") == 2 and "text_encoder is sha256:" in capsys.readouterr().err
        held_out = ["sample", "--load", str(tmp_path / "kept"), "--steps", "2", "--from-data", "2"]
        assert main([*held_out, "-o", str(tmp_path / "h.png")]) == 2
        assert "text_encoder is sha256:" in capsys.readouterr().err
        assert main([*held_out, "--encoders", str(moved), "-o", str(tmp_path / "h.png")]) == 0
        told = describe_start(given, tmp_path)
        assert re.search(r"; from here on: encoders: text_encoder sha256:\w+ \(was sha", told)
    finally:  # other tests use the folder
        shutil.rmtree(folder, ignore_errors=True)
        moved.rename(folder)
    assert sample("c.png", "--encoders", str(folder), "--encoders-dtype", "bf16") == 2
    assert "--encoders-dtype bf16: the model was trained with" in capsys.readouterr().err
    vae = tmp_path / "vae"
    shutil.copytree(folder / "vae", vae)
    weights = vae / "diffusion_pytorch_model.safetensors"
    save_file({name: 2 * value for name, value in load_file(weights).items()}, weights)
    assert sample("d.png", "--vae", str(vae)) == 0
    assert "wrong unless both share their latents" in capsys.readouterr().err
    config = vae / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"scaling_factor": 0.25}))
    assert sample("e.png", "--vae", str(vae)) == 2
    assert "scale [0.25], shift [0.0], the model's latents are of" in capsys.readouterr().err


def describe_start(flags: list[str], folder: Path) -> str:
    """Line on the start of the run with these flags."""
    from megatron_pulse.integration.checkpoint.resume_checks import NewRun, describe
    from megatron_pulse.integration.setup import prepare, read_command_line

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pretrain_diffusion.py", *BASE, *flags])
        patch.setenv("WORLD_SIZE", "2")
        line, options, plan = read_command_line()
        _, data, start = prepare(line, options, plan)
    assert start is not None
    record = line.args.pulse_record
    return describe(start, NewRun(line.args, options, record, data.encoded_by, data.record(True)))


def test_auto_fills_where_that_is_sooner(
    folder: Path, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_pulse.integration.planning import auto_tune
    from megatron_pulse.planner.tune.plans.verify_figures import load_checked

    plan = load_checked(
        make_plan(tmp_path / "plan.json", Config(2, 1, 1, 2, FOLD_EXACT), "sd-tiny", OPTIONS)
    )
    monkeypatch.setattr(auto_tune, "FILLING_S", 0.3)
    backbone = load_backbone("sd-tiny", dict(OPTIONS))
    data = flags[flags.index("--pulse-data") + 1]
    options = PulseOptions(
        "sd-tiny", data=data, encoders=str(folder), encoder_schedule=("vae=before-step",)
    )
    filled = auto_tune._filled(plan, options, backbone)
    assert [task.name for task in filled.schedule.bubble_tasks] == ["text_encoder"]
    stored = replace(options, encoder_schedule=("before-step",))
    assert auto_tune._filled(plan, stored, backbone) is plan
    assert not auto_tune._other_encoders(plan, options, backbone)
    assert not auto_tune._other_encoders(filled, options, backbone)
    said = auto_tune._other_encoders(filled, replace(options, encoders=None), backbone)
    assert said == "was tuned for text_encoder in the loop, but this run leaves nothing to the plan"
    said = auto_tune._other_encoders(filled, replace(options, encoder_schedule=()), backbone)
    assert said.endswith("this run leaves text_encoder, vae to the plan")


def test_latents_ahead_and_text_in_the_loop(
    folder: Path,
    flags: list[str],
    expected: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stored posteriors and token ids train as what the run encodes; another folder's do not."""
    at, out = flags.index("--pulse-data") + 1, tmp_path / "latents"
    options = [f"--option={name}={value}" for name, value in OPTIONS.items()]
    argv = ["--from", flags[at], "--image-size", "8", "--channels", "1", "--dtype", "fp32"]
    argv += ["--encoders", str(folder), "--backbone", "sd-tiny", *options]
    assert main(["data", "write-latents", *argv, "--store-text", "tokens", "-o", str(out)]) == 0
    given = [*flags[:at], f"latents:{out}", *flags[at + 1 :]]
    assert_same(run(2, *given, *pipeline(2), backbone="unet"), expected)
    meta = out / "meta.json"
    content = unsealed_record(meta)
    content["layout"]["made_by"] |= {"latent": "another", "text_encoder_ids": "others"}
    meta.write_text(json.dumps(content))
    faults = refuse(monkeypatch, 1, given, [*TINY["unet"], *BASE])
    for words in (
        "latent was made by another, but the run needs Auto",
        "ids was made by others, but the run needs",
    ):
        assert sum(words in fault for fault in faults) == 1, faults


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["vae=store"], "has no latents. Write them first: 'pulse data write-latents --from"),
        (
            ["fill"],
            "--pulse-encoder-schedule vae=fill: the plan does not run it in pipeline bubbles",
        ),
        (["text=before-step", "tex=fill"], "no encoder is called 'tex'; did you mean text?"),
        (
            ["vae=before-step", "text=before-step", "vae=fill"],
            "vae=before-step and --pulse-encoder-schedule vae=fill contradict each other",
        ),
        (
            ["sometimes"],
            "sometimes: write auto, store, fill, before-step, or NAME= and one of these",
        ),
    ],
)
def test_policies_that_cannot_be(
    more: list[str], said: str, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = [word for policy in more for word in ("--pulse-encoder-schedule", policy)]
    faults = refuse(monkeypatch, 1, [*flags, *policies], [*TINY["unet"], *BASE])
    assert any(said in fault for fault in faults), faults


def test_a_plan_of_other_encoders_is_refused_before_anything_is_built(
    flags: list[str], folder: Path, costs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder with one more layer would otherwise fail on a rank in its first step."""
    plan = make_plan(tmp_path / "plan.json", Config(2, 1, 1, 2, ROW), "sd-tiny", OPTIONS, costs)
    deeper = tmp_path / "deeper"
    shutil.copytree(folder, deeper)
    make_encoder("clip", 16, 16, layers=4).save_pretrained(deeper / "text_encoder")
    given = [str(deeper) if word == str(folder) else word for word in flags]
    given = [*given[len(STEPS + READS) :], "--pulse-plan", str(plan), *STEPS[2:]]
    (fault,) = refuse(monkeypatch, 2, given, BASE)
    assert re.search(r"text_encoder has (\d) layers, this one has (?!\1)\d. Tune with", fault)

    at, out = flags.index("--pulse-data") + 1, tmp_path / "latents"
    options = [f"--option={name}={value}" for name, value in OPTIONS.items()]
    argv = ["--from", flags[at], "--image-size", "8", "--channels", "1", "--dtype", "fp32"]
    argv += ["--encoders", str(folder), "--backbone", "sd-tiny", *options]
    assert main(["data", "write-latents", *argv, "--store-text", "tokens", "-o", str(out)]) == 0
    given = [str(folder) if word == str(deeper) else word for word in given]
    given[given.index(flags[at])] = f"latents:{out}"
    (fault,) = refuse(monkeypatch, 2, given, BASE)
    assert "the plan runs vae in pipeline bubbles, but this run does not" in fault
    assert "it uses text_encoder): its results are in the data" in fault


def test_folders_that_cannot_encode_are_refused_before_anything_is_built(
    flags: list[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt = tmp_path / "spoilt"
    shutil.copytree(folder, spoilt)
    given = ["spoilt" if word == str(folder) else word for word in flags]
    given[given.index("spoilt")] = str(spoilt)

    def faults(*more: str) -> str:
        return "\n".join(refuse(monkeypatch, 1, [*given, *more], [*TINY["unet"], *BASE]))

    four = ["--pulse-option", "in_channels=4", "--pulse-option", "out_channels=4"]
    assert "makes latents of 2 channels" in faults(*four)
    weights = spoilt / "vae/diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (spoilt / "text_encoder/model.safetensors").unlink()
    said = faults()
    assert f"{spoilt}: text_encoder holds no such weights" in said
    assert f"{spoilt}: vae: " in said and "diffusion_pytorch_model.safetensors: " in said
    assert said.count(". Download the file again") == 2
    shutil.rmtree(spoilt / "vae")
    (spoilt / "text_encoder/model.safetensors").write_bytes(
        (folder / "text_encoder/model.safetensors").read_bytes()
    )
    assert "takes latents of 4 channels" in faults(*four)
    at = given.index("--pulse-encoders")
    del given[at : at + 2]
    given = [word.replace("captions:", "folder:") for word in given]
    assert "Encode captions in the loop (--pulse-encoders DIR provides context)" in faults()


def test_what_is_stored_is_what_is_encoded(
    flags: list[str],
    folder: Path,
    expected: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also after a store of other encoders took the place of that of the training."""
    source = flags[flags.index("--pulse-data") + 1]
    options = [f"--option={name}={value}" for name, value in OPTIONS.items()]

    def write(encoders: Path, name: str) -> str:
        argv = ["data", "write-latents", "--from", source, "--image-size", "8", "--channels", "1"]
        argv += ["--backbone", "sd-tiny", *options, "--encoders", str(encoders), "--dtype", "fp32"]
        assert main([*argv, "-o", str(tmp_path / name)]) == 0
        return f"latents:{tmp_path / name}"

    kept, latents = tmp_path / "kept", write(folder, "latents")
    given = [*STEPS, *READS, *DROPS]
    save = ["--save", str(kept), "--save-interval", "2"]
    data = ["--pulse-data", latents]
    assert_same(run(2, *given, *data, *save, *pipeline(2), backbone="unet"), expected)

    other = tmp_path / "other"
    shutil.copytree(folder, other)
    make_encoder("clip", 16, 16).save_pretrained(other / "text_encoder")
    config = other / "vae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"scaling_factor": 0.25}))
    others = write(other, "others")
    (fault,) = refuse(
        monkeypatch, 1, [*given, "--pulse-data", f"{latents},{others}"], [*TINY["unet"], *BASE]
    )
    for field in ("latent", "context"):
        assert f"{field} of {others} was made by " in fault and f"that of {latents} by " in fault
    resumed = [*TINY["unet"], *BASE, *given, "--train-iters", "3"]
    for place in (tmp_path / "others", tmp_path / "latents"):
        if place.name == "latents":  # the same path holds another store
            shutil.rmtree(place)
            (tmp_path / "others").rename(place)
            others = latents
        (fault,) = refuse(monkeypatch, 1, [*resumed, *save[:2], "--pulse-data", others], [])
        assert "its data are of other encoders" in fault, fault
        assert re.search(r"latent was made by .* scale \[0\.5\].*, in this run by .*0\.25", fault)
        assert "context was made by text_encoder last" in fault
        assert f"--pretrained-checkpoint {kept}" in fault
    begun = [*resumed, "--pulse-data", others, "--pretrained-checkpoint", str(kept)]
    assert re.search("from here on: latent made.*, context made", describe_start(begun, tmp_path))
    looped = [*resumed, *save[:2], "--pulse-data", source, "--pulse-encoders"]
    assert "encoders: vae" in describe_start([*looped, str(other)], tmp_path)
    assert "encoders: vae" not in describe_start([*looped, str(folder)], tmp_path)

    def sample(*more: str) -> tuple[int, str]:
        argv = ["sample", "--load", str(kept), "-o", str(tmp_path / "a.png"), "--steps", "2"]
        status = main([*argv, "--per-class", "1", *more])
        return status, capsys.readouterr().err

    def drawn(encoders: Path, vae: Path) -> tuple[int, str]:
        return sample("--prompt", "a bird", "--encoders", str(encoders), "--vae", str(vae / "vae"))

    assert drawn(folder, folder)[0] == 0
    status, said = drawn(folder, other)
    assert status == 2 and "scale [0.25], shift [0.0], the model's latents are of" in said
    status, said = drawn(other, folder)
    assert status == 2 and "context was made by text_encoder last" in said
    status, said = sample("--from-data", "1", "--vae", str(folder / "vae"))
    assert status == 2 and f"the data {latents}: context was made by text_encoder last" in said
    meta = tmp_path / "latents" / "meta.json"  # as of a writer that does not say
    content = unsealed_record(meta)
    content["layout"]["made_by"] = {}
    meta.write_text(json.dumps(content))
    said = describe_start([*resumed, *save[:2], "--pulse-data", latents], tmp_path)
    assert "latent made by what is not known (was AutoencoderKL sha256:" in said


def test_a_controlnet_in_idle_time_is_what_was_stored(
    folder: Path, flags: list[str], costs: Path, tmp_path: Path
) -> None:
    """The other picture comes as it is, beside latents and texts that are made in the loop."""
    shutil.copytree(flags[flags.index("--pulse-data") + 1].partition(":")[2], tmp_path / "photos")
    source = f"captions:{tmp_path / 'photos'}"
    beside = tmp_path / "photos.conditioning"
    beside.mkdir()
    for path in (tmp_path / "photos").glob("*.png"):
        ImageOps.invert(Image.open(path)).save(beside / path.name)
    options = OPTIONS | {"conditioning_widths": "4,8", "conditioning_channels": "1"}
    argv = ["data", "write-latents", "--from", source, "--image-size", "8", "--channels", "1"]
    argv += [f"--option={name}={value}" for name, value in options.items()]
    argv += ["--backbone", "controlnet-tiny", "--encoders", str(folder), "--dtype", "fp32"]
    assert main([*argv, "-o", str(tmp_path / "latents")]) == 0
    given = [word for k, v in options.items() for word in ("--pulse-option", f"{k}={v}")]
    given += ["--pulse-class-dropout", "0.4"]
    alone = run(
        1, *STEPS, "--pulse-backbone", "controlnet-tiny", *given,
        "--pulse-data", f"latents:{tmp_path / 'latents'}", backbone="none",
    )  # fmt: skip
    config = Config(2, 1, 1, 2, FOLD_EXACT)
    plan = make_plan(tmp_path / "plan.json", config, "controlnet-tiny", options, costs)
    got = run(
        2, "--pulse-data", source, "--pulse-encoders", str(folder), *STEPS[2:],
        "--pulse-plan", str(plan), "--pulse-class-dropout", "0.4", backbone="none",
    )  # fmt: skip
    assert "X" in got.executed.operations
    assert_same(got, alone)
