"""Bad input: one clear message with every fault, exit code 2, and no file left behind."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.processes import NO_FOLDER
from tests.cli.conftest import Refused


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


SAMPLE = ["sample", "--load", "run", "-o", "grid.png"]
CASES = {
    "missing checkpoint folder": ([*SAMPLE], ["--load run is not a folder"]),
    "bad classes": ([*SAMPLE, "--classes", "a-3"], ["write classes as 0-9 or 3,5"]),
    "backward classes": ([*SAMPLE, "--classes", "9-0"], ["runs backwards"]),
    "several at once": (
        [*SAMPLE[:3], "-o", "grid.jpg", "--steps", "0", "--per-class", "0", "--guidance", "nan"],
        ["must end in .png", "--steps is 0; it must be from 1 to the timesteps of",
         "--per-class is 0", "--guidance is nan", "5 faults"],
    ),
    "no vae": ([*SAMPLE, "--vae", "nowhere"], ["--vae nowhere holds no config.json"]),
    "report name": ([*SAMPLE, "--json", "report.txt"], ["--json report.txt", ".json"]),
    "unknown dataset": (["data", "info", "imagenet"], ["no dataset 'imagenet'", "digits8"]),
    "missing image folder": (
        ["data", "info", "folder:nowhere", "--image-size", "8"],
        ["it is not a folder"],
    ),
    "no image size": (["data", "info", "folder:."], ["images need a size"]),
    "image size": (["data", "info", "mnist", "--image-size", "0"], ["--image-size is 0"]),
    "huge images": (
        ["data", "write-latents", "--from", "mnist", "-o", "b", "--image-size", "1000000"],
        ["--image-size is 1,000,000; it must be from 1 to 8,192 pixels"],
    ),
    "huger images": (
        ["data", "info", "mnist", "--image-size", "9" * 400],
        ["--image-size is 9,999,999,999,999,99...; it must be from 1 to 8,192 pixels"],
    ),
    "huge emoji": (["data", "emoji", "--to", "e", "--size", "9000"], ["--size is 9,000; it must"]),
    "endless samples": ([*SAMPLE, "--steps", "10000000"], ["--steps is 10,000,000; it must be"]),
    "more devices than there are": (
        ["partition", "--profile", "p.json", "-p", "1000000", "--microbatches", "10000000"],
        ["--num-devices is 1,000,000; it must be", "--microbatches is 10,000,000; it must be"],
    ),
    "endless batches": (
        ["tune", "--profile", "p.json", "--cluster", "cpu", "--global-batch-size", "1000000000"],
        ["--global-batch-size is 1,000,000,000; it must be from 1 to 1,000,000"],
    ),
    "endless threads": (
        [*"profile --backbone uvit-tiny -o p.json".split(),
         *"--threads 100000 --micro-batch-size 1,9999999".split()],
        ["--threads is 100,000; it must be", "--micro-batch-size is 9,999,999; it must be"],
    ),
    "nameless export": (["export", "--load", ".", "--to", ""], ["--to .: name a new file"]),
    "endless schedule": (
        ["schedule", "--profile", "p.json", "-p", "2", "-m", "20000"],
        ["--microbatches is 20,000; it must be from 1 to 4,096"],
    ),
    "latents of latents": (
        ["data", "write-latents", "--from", "latents:a", "-o", "b", "--batch-size", "0"],
        ["latents already", "--batch-size is 0"],
    ),
    "captions without states": (
        ["data", "write-latents", "--from", "captions:a", "-o", "b"],
        ["give --encoders and --backbone, or --text-states", "give --image-size"],
    ),
    "states of no captions": (
        ["data", "write-latents", "--from", "mnist", "-o", "b", "--text-states", "12"],
        ["--text-states is for captions", "write length and width as 12x64"],
    ),
    "missing captions": (
        ["data", "info", "captions:nowhere", "--image-size", "8"],
        ["nowhere: it is not a folder", "pulse data emoji"],
    ),
    "no font": (
        ["data", "emoji", "--to", "faces", "--font", "no.ttf"],
        ["there is no font no.ttf", "apt-get install fonts-noto-color-emoji"],
    ),
    "bad emoji": (
        ["data", "emoji", "--to", "faces", "--size", "0", "--limit", "0"],
        ["--size is 0", "--limit is 0"],
    ),
    "data without samples of it": ([*SAMPLE, "--data", "mnist"], ["--data is for --from-data"]),
    "write unknown dataset": (["data", "write-latents", "--from", "cifar", "-o", "b"], ["'cifar'"]),
    "one expert": (
        [*SAMPLE, "--boundary-ratio", "0.5", "--low-noise-guidance", "-1"],
        ["--boundary-ratio is for --low-noise", "--low-noise-guidance is -1; it must be 0 or more"],
    ),
    "no second expert": ([*SAMPLE, "--low-noise", "none"], ["--low-noise none is not a folder"]),
    "unknown backbone": (["backbones", "uvit-xxl"], ["'uvit-xxl'", "uvit-h"]),
    "no events": (["curve", "--tensorboard-dir", ".", "-o", "l.png"], ["no TensorBoard event"]),
    "no plan": (["verify", "no.json"], ["'pulse tune ... -o no.json' makes one"]),
    "no plan to show": (["show", "no.json"], ["'pulse tune ... -o no.json' makes one"]),
    "no profile, no cluster": (
        "tune --profile p.json --cluster c.yaml --global-batch-size 8".split(),
        ["--profile p.json: there is no such file; 'pulse profile --backbone NAME -o p.json' makes",
         "'pulse clusters NAME > c.yaml' writes one"],
    ),
    "no trace": (
        ["compare", "no.json", "trace"],
        ["PLAN no.json: there is no such file; 'pulse tune", "a run with --pulse-trace DIR"],
    ),
    "no tensorboard folder": (
        ["curve", "--tensorboard-dir", "tb", "-o", "l.jpg"],
        ["tb is not a folder", "must end in .png"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([*SAMPLE, "--guidance", "1,2,3"], "'1,2,3': give a number, or two"),
        (
            ["data", "write-latents", "--from", "mnist", "-o", "b", "--frame-noise", "none"],
            "'none': write median and deviation as 0.05,0.5",
        ),
    ],
)
def test_numbers_are_refused_by_their_flag(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused(case: str, refused: Refused) -> None:
    argv, expected = CASES[case]
    refused(argv, *expected)


def test_empty_checkpoint_folder_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "run").mkdir()
    assert main(SAMPLE) == 2
    assert "holds no checkpoint" in capsys.readouterr().err
    assert not (here / "grid.png").exists()


def test_unwritable_outputs_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file in the place of the output's folder; permissions do not bind root."""
    (here / "file").touch()
    for argv in (
        ["sample", "--load", ".", "-o", "file/grid.png"],
        ["curve", "--tensorboard-dir", ".", "-o", "file/loss.png"],
        ["data", "write-latents", "--from", "digits8", "-o", "file/latents"],
    ):
        assert main(argv) == 2
        assert "file is a file, not a folder" in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("pretrain", "pulse run --nproc-per-node N launch/pretrain_diffusion.py"),
        ("fine_tune", "pulse train RECIPE"),
        ("launch", "pulse run"),
        ("generate", "pulse sample"),
        ("convert", "pulse import"),
        ("Eval", "pulse sample --score"),
        ("tun", "did you mean tune"),
        ("", "there are: backbones"),
    ],
)
def test_guessed_commands_name_the_right_one(
    name: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--lr", "1e-3"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("pulse: error: ") and instead in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "show plan.json --gird --w 1",
            "show: error: 2 faults:\n  - there is no --gird; did you mean --grid?\n"
            "  - there is no --w",
        ),
        ("data info mnist --dtyp x", "data info: error: there is no --dtyp"),
        ("data chek photos", "'emoji'); did you mean check?"),
        ("checkpoint lst runs", "'prune'); did you mean list?"),
        ("sample --load a -o b --noise difuser", "'diffusers'); did you mean diffusers?"),
        ("show plan.json more", "show: error: what is 'more'? no flag takes it"),
        (
            "tune --profile p.json --cluster c.yaml --global-batch-size 8 --memory-gb 12",
            "tune: error: --memory-gb: a device's memory is memory_gb in the file of --cluster",
        ),
    ],
)
def test_unknown_flags_are_errors_of_their_command(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert said in err and f"usage: pulse {words.split()[0]}" in err


def test_unknown_group_of_flags_suggests_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flags", "--group", "trainin"]) == 2
    assert "no group is called 'trainin'; did you mean training" in capsys.readouterr().err


def pulse(*words: str, streams: str = "") -> tuple[int, str]:
    """Exit status, and standard error unless ``streams`` (for a shell) close it."""
    line = f"exec {shlex.join([sys.executable, '-m', 'megatron_pulse.cli', *words])} {streams}"
    ended = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
    return ended.returncode, ended.stderr


def test_closed_streams_change_nothing(here: Path) -> None:
    """Files that are written do not take the place of standard output either."""
    assert pulse("clusters", streams=">&-") == (0, "")
    assert pulse("flags", "optimizer", "--json", streams=">&- 2>&-") == (0, "")
    status, said = pulse("check", "none.json", streams=">&-")
    assert status == 2 and said.startswith("pulse check: error: none.json")
    assert pulse("check", "none.json", streams="2>&-")[0] == 2


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_named(
    unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    assert pulse("clusters", streams="> /dev/full") == (
        2, "pulse clusters: error: standard output: No space left on device\n"
    )  # fmt: skip


def test_missing_working_folder_is_named(here: Path) -> None:
    line = f"rmdir {here}; exec {sys.executable} -m megatron_pulse.cli clusters"
    ended = subprocess.run(["sh", "-c", line], capture_output=True, text=True, cwd=here)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr == f"pulse: error: {NO_FOLDER}\n"


def test_run_names_why_ranks_cannot_be_started(tmp_path: Path) -> None:
    """Ranks of a run without a port start beside one that has torchrun's."""
    script = tmp_path / "mine.py"
    script.write_text("import os\nassert os.environ['MASTER_PORT'] != '29500'\n")
    said = "pulse run: error: "
    ranks = ["run", "--nproc-per-node"]
    calls = [
        [*ranks, "1", "no.py"],
        [*ranks, "0", str(script)],
        [*ranks, "1", str(script)],
        [*ranks, "1", "--master-port", "29500", str(script)],
    ]
    code = f"""
import socket
from contextlib import suppress
from megatron_pulse.cli.main import main
taken = socket.socket()
with suppress(OSError):  # else another run has it
    taken.bind(("", 29500))
    taken.listen()
assert [*map(main, {calls})] == [2, 2, 0, 2]
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == (
        f"{said}no.py: there is no such script\n"
        f"{said}ranks cannot be started: their number must be 1 or more\n"
        f"{said}ranks cannot be started: another program has port 29500: give --master-port "
        "another, or on one node leave it out\n"
    )


@pytest.mark.parametrize("command", ["sample", "write-latents"])
def test_vae_refuses_a_pipeline_folder(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its autoencoder is named, and its encoders where it is whole; a part is no pipeline."""
    folder, out = tmp_path / "sd", tmp_path / "out"
    (folder / "vae").mkdir(parents=True)
    (folder / "vae/config.json").write_text("{}")
    words = ["sample", "--load", str(tmp_path), "-o", f"{out}.png", "--vae", str(folder)]
    if command == "write-latents":
        words = ["data", command, "--from", "digits8", "-o", str(out), "--vae", str(folder)]

    def refused(*more: str) -> str:
        assert main([*words, *more]) == 2
        return capsys.readouterr().err

    advice = (
        f"--vae {folder} is a pipeline's folder: give the autoencoder in it, --vae {folder}/vae"
    )
    assert advice in (said := refused()) and "--encoders" not in said
    (folder / "model_index.json").write_text("{}")
    assert f"{advice}, or all its encoders, --encoders {folder}" in refused()
    part = refused("--encoders", str(folder / "vae"))
    assert f"vae is a part of a pipeline's folder: give --encoders {folder}" in part
