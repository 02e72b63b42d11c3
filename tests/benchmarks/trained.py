"""Modules in whole Megatron runs: layouts bit for bit, exported and read back, data parallelism.

    .venv/bin/python -m tests.benchmarks.trained [--only NAME]

``text``: diffusers' UNet2DConditionModel on text states. ``video``: its
UNetSpatioTemporalConditionModel, whose three-dimensional convolutions split their backwards.
``lora``: the former behind a function of one's own that freezes it and gives it adapters by peft,
which must be installed. Each is trained on one process and in pipelines (``LAYOUTS``), what differs
is told, and the trained weights are exported, read back by the module's own library and compared.
``data``: two data-parallel ranks beside one process, by plain gradient descent and by Adam with the
distributed optimizer. With one microbatch on each rank there is but one order to add gradients in,
and all is the same to the bit; with two, one process adds four in turn and the ranks add sums of
two, and the norm of what differs is at most 1e-6 of the weights'. The exit status is 1 if not.
"""

from __future__ import annotations

import math
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_pulse.cli.import_megatron import prepare_megatron
from megatron_pulse.cli.main import main as pulse
from tests.benchmarks.bits import Way, compare
from tests.benchmarks.report import Flags, Report
from tests.integration.runs import Run, assert_same, pipeline, run

LAYOUTS: Mapping[str, tuple[int, list[str]]] = {
    "P=4 fold": (4, pipeline(4)),
    "P=4 fold, split, recomputed": (
        4,
        pipeline(4, "--pulse-schedule", "wave-split", "--recompute-granularity", "full"),
    ),
    "P=2 sequential, split": (
        2,
        pipeline(2, "--pulse-schedule", "zb-h1", "--pulse-placement", "sequential"),
    ),
}
STEPS = ["--global-batch-size", "8", "--train-iters", "3"]
SAID = ["--pulse-objective", "v", "--pulse-noise-schedule", "scaled_linear"]
TEXT, WIDTH = 3, 6
ROUNDING, CLOSE = 1e-4, 1e-6
"""Sums of gradients in another order, as a share of the weights' moves, and of the weights."""

LORA = """
    import diffusers
    import peft
    import torch


    def build(rank=2):
        unet = diffusers.UNet2DConditionModel(**SIZES)
        where = ["to_q", "to_k", "to_v", "to_out.0", "proj_in"]
        config = peft.LoraConfig(r=rank, lora_alpha=4, target_modules=where)
        return peft.inject_adapter_in_model(config, unet), {
            "sample": torch.zeros(2, 4, 8, 8),
            "timestep": torch.zeros(2),
            "encoder_hidden_states": torch.zeros(2, 3, 6),
        }, {"fields": {"encoder_hidden_states": "context"}}
"""
SIZES: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "cross_attention_dim": WIDTH,
    "attention_head_dim": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}


@dataclass
class Found:
    """What is wrong with one case; all that is found of it is printed as it comes."""

    name: str
    report: Report
    faults: list[str] = field(default_factory=list)

    def say(self, what: str) -> None:
        """Report a line of this case."""
        self.report.add({"case": self.name, "found": what})


def text_unet() -> Any:
    """The module of ``text``."""
    import diffusers

    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(**SIZES)


def video_unet() -> Any:
    """The module of ``video``."""
    import diffusers

    torch.manual_seed(0)
    return diffusers.UNetSpatioTemporalConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(32, 32),
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        layers_per_block=1, cross_attention_dim=WIDTH, num_attention_heads=(2, 2), num_frames=2,
        projection_class_embeddings_input_dim=24, addition_time_embed_dim=8,
    )  # fmt: skip


def write_latents(folder: Path, shape: tuple[int, ...], **fields: tuple[int, ...]) -> list[str]:
    """Random latents of a shape, with fields of theirs; the flags that train on them."""
    from megatron_pulse.data.dataset import FieldSpec
    from megatron_pulse.data.latents.layout import LatentLayout, LatentType
    from megatron_pulse.data.latents.writer import LatentWriter

    generator = torch.Generator().manual_seed(0)
    specs = {name: FieldSpec(each) for name, each in fields.items()}
    with LatentWriter(folder, LatentLayout(shape, 1, LatentType.FLOAT32, specs)) as writer:
        for _ in range(48):
            latent = torch.randn(shape, generator=generator)
            given = {n: torch.randn(each, generator=generator) for n, each in fields.items()}
            writer.add(latent, 0, given)
        writer.close()
    return ["--pulse-data", f"latents:{folder}"]


def of_text(place: Path) -> list[str]:
    """Latents of pictures with texts."""
    return write_latents(place / "latents", (4, 8, 8), context=(TEXT, WIDTH))


def text(found: Found, place: Path) -> None:
    """A UNet of pictures that reads text states."""
    data = [*of_text(place), "--pulse-option", f"text_length={TEXT}"]
    of_class(found, text_unet(), data, place)


def video(found: Found, place: Path) -> None:
    """A UNet of videos."""
    fields = {"image_embedding": (1, WIDTH), "added_time_ids": (3,)}
    data = write_latents(place / "latents", (2, 4, 8, 8), **fields)
    of_class(found, video_unet(), data, place)


def of_class(found: Found, module: Any, data: Sequence[str], place: Path) -> None:
    """A class of diffusers, from its folder and back to one."""
    module.save_pretrained(place / "module")
    flags = ["--pulse-module", f"diffusers:{place / 'module'}", *SAID, *data]
    expected = in_layouts(found, flags, place)
    out = place / "out"
    assert pulse(["export", "--load", str(place / "run"), "--to", str(out), "--raw"]) == 0
    state = type(module).from_pretrained(out).state_dict()
    read_back(found, state, expected)


def of_lora(found: Found, place: Path) -> None:
    """Code of one's own with a frozen base, from a file and back to one."""
    from safetensors.torch import load_file, save_file

    code = textwrap.dedent(LORA).replace("**SIZES", f"**{SIZES!r}")
    (place / "mine.py").write_text(code)
    module = f"{place}/mine.py:build"
    made: dict[str, Any] = {}
    exec(compile(code, "mine.py", "exec"), made)
    torch.manual_seed(0)
    before = made["build"]()[0].state_dict()
    save_file(before, place / "mine.safetensors")
    source = ["import", "--from", str(place / "mine.safetensors"), "--module", module]
    process = ["--objective", "v", "--noise-schedule", "scaled_linear"]
    assert pulse([*source, "--to", str(place / "start"), *process]) == 0
    flags = [
        *("--pulse-module", module, "--pretrained-checkpoint", str(place / "start")),
        *of_text(place),
    ]
    expected = in_layouts(found, flags, place)
    out = place / "out.safetensors"
    load = ["--load", str(place / "run"), "--module", module]
    assert pulse(["export", *load, "--to", str(out), "--raw"]) == 0
    again = made["build"]()[0]
    again.load_state_dict(load_file(out))
    state = again.state_dict()
    moved = {key for key in before if not torch.equal(before[key], state[key])}
    adapters = {key for key in before if "lora_" in key}
    if moved != adapters:
        found.faults.append(f"training moved {sorted(moved ^ adapters)} wrongly")
    found.say(f"{len(adapters)} adapters of {len(before)} tensors were trained")
    read_back(found, state, expected)


def in_layouts(found: Found, flags: Sequence[str], place: Path) -> Run:
    """A run on one process, and in every layout; the first of them is saved in ``place/run``."""

    def train(num_ranks: int, *more: str) -> Run:
        return run(num_ranks, *flags, *STEPS, *more, backbone="none")

    expected, save = train(1), ["--save", str(place / "run")]
    ways = []
    for layout, (num_ranks, said) in LAYOUTS.items():
        ways.append(Way(layout, partial(train, num_ranks, *said, *save)))
        save = []
    same = compare(found.report, found.name, iter(ways), lambda: expected)
    found.faults += [f"{w.name} differs" for w, equal in zip(ways, same, strict=True) if not equal]
    return expected


def read_back(found: Found, state: Mapping[str, Tensor], expected: Run) -> None:
    """What was exported beside what was trained."""
    wrong = [name for name, weight in expected.main_params.items() if name not in state
             or not torch.equal(state[name], weight)]  # fmt: skip
    found.faults += [f"{name} is not what was trained" for name in wrong]
    found.say(f"exported and read back: {len(expected.main_params)} tensors")


def of_data(found: Found, place: Path) -> None:
    """Two data-parallel ranks beside one process: of two microbatches, whose sum has one order, and
    of four."""
    module = text_unet()
    module.save_pretrained(place / "module")
    before = {key: value.clone() for key, value in module.state_dict().items()}
    flags = [
        *("--pulse-module", f"diffusers:{place / 'module'}", *SAID, *of_text(place)),
        *("--pulse-option", f"text_length={TEXT}"),
    ]
    distributed = ["--use-distributed-optimizer"]  # which has no plain descent
    for optimizer, rate, more in (("sgd", "1e-2", []), ("adam", "1e-3", distributed)):
        chosen = ["--optimizer", optimizer, "--lr", rate, "--weight-decay", "0"]
        if optimizer == "sgd":
            chosen += ["--sgd-momentum", "0"]
        for batch in (4, 8):
            steps = ["--global-batch-size", str(batch), "--train-iters", "3"]
            alone = run(1, *flags, *chosen, *steps, backbone="none")
            both = run(2, *flags, *chosen, *steps, *more, "--overlap-grad-reduce", backbone="none")
            of_weights, of_moves = apart(both.main_params, alone.main_params, before)
            found.say(
                f"{optimizer}, {batch // 2} microbatches: weights {of_weights:.1e} apart, moves "
                f"{of_moves:.1e}, of their norms"
            )
            if batch == 4:
                try:
                    assert_same(both, alone)
                except AssertionError as error:
                    found.faults.append(f"{optimizer}: {str(error)[:300]}")
            elif of_moves > ROUNDING or of_weights > CLOSE:
                found.faults.append(f"{optimizer}: further apart than sums in another order are")


def apart(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> tuple[float, float]:
    """The norm of all that differs, as a share of the weights' and of their moves'."""

    def norm(of: Callable[[str], Tensor]) -> float:
        return math.sqrt(sum(of(key).double().square().sum().item() for key in expected))

    between = norm(lambda key: got[key] - expected[key])
    moved = norm(lambda key: expected[key] - before[key])
    return between / norm(lambda key: expected[key]), between / moved


CASES: Mapping[str, Callable[[Found, Path], None]] = {
    "text": text,
    "video": video,
    "lora": of_lora,
    "data": of_data,
}


def main() -> int:
    """Run the command; returns its exit status."""
    flags = Flags(__doc__)
    flags.add("--only", [], action="append", choices=list(CASES), metavar="NAME")
    args = flags.parse_args()
    names = args.only or list(CASES)
    if "lora" in names and find_spec("peft") is None:
        flags.error("lora needs peft: pip install peft, or name the others with --only")
    prepare_megatron()
    report, faulty = Report(args.json), False
    for name in names:
        found = Found(name, report)
        with tempfile.TemporaryDirectory() as place:
            CASES[name](found, Path(place))
        for fault in found.faults:
            found.say(f"FAULT {fault}")
        faulty = faulty or bool(found.faults)
    return int(faulty)


if __name__ == "__main__":
    sys.exit(main())
