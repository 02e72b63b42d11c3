"""Files that ``mutations`` damages, commands that read them, and checks of what these accept.

A check compares what a file says, read by other means, with what its reader made of it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_pulse.files import HASH, write_with_checksum
from megatron_pulse.planner.bubble_fill.components import Component, FrozenLayer
from megatron_pulse.planner.bubble_fill.encoder_table import (
    EncoderOrigin,
    EncoderTable,
    component_records,
    components_of,
    read_table,
)
from megatron_pulse.planner.cluster.cluster import cluster, load_cluster, save_cluster, to_record
from megatron_pulse.planner.plan_file.plan_file import save_plan
from megatron_pulse.planner.schedule.serialize import to_csv
from megatron_pulse.planner.trace.trace import load_trace, save_trace
from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from megatron_pulse.profile.files import load_profile, save_profile
from tests.plans import small_plan, small_profile, trace_of

type Pairs = Iterable[tuple[Any, Any]]
"""Pairs of what was said and what was read."""


def plain(path: Path) -> Any:
    """JSON as the standard library reads it, strictly, without our checksum."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({k for k, _ in pairs}) == len(pairs), "a key is there twice"
        return dict(pairs)

    def never(text: str) -> Any:
        raise AssertionError(f"{text} is no JSON")

    text = path.read_bytes().decode("utf-8-sig")
    said = json.loads(text, object_pairs_hook=once, parse_constant=never)
    if isinstance(said, dict):
        said.pop(HASH, None)
    return said


def difference(said: Any, read: Any, where: str = "") -> str:
    """Where two JSON values differ first; 1 and 1.0 are the same number, true and 1 are not."""
    inner: Iterable[Any] = ()
    if isinstance(said, dict) and isinstance(read, dict):
        said, read = ({str(k): v for k, v in d.items()} for d in (said, read))
        if said.keys() == read.keys():
            inner = said
    elif isinstance(said, list | tuple) and isinstance(read, list | tuple):
        if len(said) == len(read):
            said, read = list(said), list(read)
            inner = range(len(said))
    if inner:
        found = (difference(said[key], read[key], f"{where}.{key}") for key in inner)
        return next(filter(None, found), "")
    same = said == read and isinstance(said, bool) == isinstance(read, bool)
    return "" if same else f"{where}: {said!r:.60} said, {read!r:.60} read"


def rewritten(load: Callable[[Path], Any], save: Callable[..., Any]) -> Callable[[Path], Pairs]:
    """Check of a file that is written again as it was read."""

    def check(file: Path) -> Pairs:
        save(load(file), again := file.with_name("again.json"))
        yield plain(file), plain(again)

    return check


def check_plan(file: Path) -> Pairs:
    """The plan as a run takes it, and what its parts say of each other."""
    yield from rewritten(load_checked, save_plan)(file)
    said = plain(file)
    schedule, stages, predicted = said["schedule"], said["stages"], said["predicted"]
    order, count, home = (schedule[k] for k in ("order", "num_microbatches", "device_of_stage"))
    kinds = "FIW" if said["times"]["weight_grad"] else "FB"
    wanted = {f"{k}{s}:{m}" for k in kinds for s in range(len(stages)) for m in range(count)}
    for i, task in enumerate(schedule["bubble_tasks"]):
        wanted |= {f"X{i}:{j}" for j in range(len(task["slice_seconds"]))}
    yield sorted(wanted), sorted(op for row in order for op in row)
    for device, row in enumerate(order):
        yield {device}, {device, *(home[int(op[1:].split(":")[0])] for op in row if op[0] != "X")}
    yield said["placement"], schedule["placement"]
    yield said["global_batch_size"], said["data"] * said["micro_batch_size"] * count
    yield [len(order), len(stages)], [said["pipeline"], said["pipeline"] * said["num_chunks"]]
    yield len({name for s in stages for name in s}), sum(map(len, stages))
    numbers = [v for v in predicted.values() if isinstance(v, int | float)]
    yield True, all(math.isfinite(v) and v >= -1e-9 for v in numbers)
    rate = predicted["samples_per_s"] * predicted["step_s"]
    yield True, math.isclose(rate, said["global_batch_size"], rel_tol=0.02)


def check_plan_of_backbone(file: Path) -> Pairs:
    """That, and the layers of the backbone that it names."""
    from model_specs import load_backbone

    yield from check_plan(file)
    said = plain(file)
    backbone = load_backbone(said["backbone"]["name"], said["backbone"]["options"])
    yield [n for stage in said["stages"] for n in stage], [layer.name for layer in backbone.layers]
    yield said["backbone"], dict(backbone.record)


def check_cluster(file: Path) -> Pairs:
    """The cluster as PyYAML reads it where YAML 1.1 and 1.2 agree."""
    read = to_record(load_cluster(file))
    said = yaml.load(file.read_bytes().decode("utf-8-sig"), yaml.BaseLoader)  # values as written
    said.pop(HASH, None)
    for name in ("usable_memory", "all_reduce_efficiency"):
        if name in said and float(said[name]) == 1:
            del said[name]

    def as_read(written: Any, read: Any) -> Any:
        if isinstance(read, dict) and isinstance(written, dict):
            return {k: as_read(v, read.get(k)) for k, v in written.items()}
        if isinstance(read, str):
            return read if os.path.basename(written) == os.path.basename(read) else written
        return float(written)

    yield as_read(said, read), read


def check_encoders(file: Path) -> Pairs:
    """The components, written again."""
    read = read_table(file)
    again = EncoderTable(component_records(components_of(read.components)), read.origin).record()
    yield plain(file), json.loads(json.dumps(again))


def check_nothing(file: Path) -> Pairs:
    """Of files that are refused whatever is changed."""
    return ()


def check_table(file: Path) -> Pairs:
    """The profile that was made of the table."""
    said, made = plain(file), load_profile(file.with_name("made.json"))
    units = [(u["name"], u["params"]) for u in said["units"]]
    yield units, [(layer.name, layer.parameters) for layer in made.layers]
    skips = [(s["src"], s["dst"], 2 * s["numel"]) for s in said["skips"]]
    yield skips, [(s.source, s.destination, s.num_bytes) for s in made.skips]


def check_times(file: Path) -> Pairs:
    """What the schedule was made for."""
    from megatron_pulse.cli.plan.schedule_input import from_times

    said = plain(file)
    given = dict(times=file, num_devices=2, microbatches=4, placement=None, waves=None, cap=None)
    task = from_times(argparse.Namespace(**given))
    names = ("backward", "activation", "link")
    read: dict[str, Any] = {k: getattr(task.whole, k) for k in names if k in said}
    if task.split is not None:
        read |= {"input_grad": task.split.backward, "weight_grad": task.split.weight_grad}
    yield said, read | {"forward": task.whole.forward}


def check_order(file: Path) -> Pairs:
    """The cells as they are written, and each operation once."""
    lines = file.read_bytes().decode("utf-8-sig").splitlines()
    cells = [c.strip().strip('"').strip() for each in lines for c in each.split(",")]
    form = re.compile(r"0*(\d+)([FBIWR])0*(\d+)|([FBIWR])(\d+):(\d+)")
    found = [form.fullmatch(cell) for cell in cells if cell]
    yield True, all(found)
    done = [(m[2] or m[4], int(m[1] or m[5]), int(m[3] or m[6])) for m in found if m]
    kinds, stages = {k for k, _, _ in done}, {s for _, s, _ in done}
    yield sorted((k, s, m) for k in kinds for s in stages for m in range(4)), sorted(done)


def check_latents(file: Path) -> Pairs:
    """``meta.json``, written again."""
    from megatron_pulse.data.latents.layout import Meta

    read = json.loads(json.dumps(Meta.load(file.parent).to_dict()))
    yield plain(file.with_name("meta.json")), read


def check_captions(file: Path) -> Pairs:
    """The captions, line by line; behind them come pictures that no line names."""
    from megatron_pulse.data.images.metadata import read_captions

    texts = [text for _, text in read_captions(file.parent).pairs]
    lines = file.with_name("metadata.jsonl").read_bytes().decode("utf-8-sig").split("\n")
    records = [json.loads(each, strict=False) for each in lines if each.strip()]
    yield [each.get("text") or "" for each in records], texts[: len(records)]


def check_model(file: Path) -> Pairs:
    """The backbone's own account of itself beside the published configuration."""
    from megatron_pulse.diffusion.published import read_config, read_folder
    from model_specs import load_published, published_form

    folder = file.parent
    said = {k: v for k, v in plain(folder / "config.json").items() if v is not None}
    form = published_form(load_published(read_config(folder)))
    assert form is not None
    known = said.keys() & form.config.keys()
    yield {k: said[k] for k in known}, {k: form.config[k] for k in known}
    index = plain(folder / "diffusion_pytorch_model.safetensors.index.json")["weight_map"]
    yield set(), index.keys() - read_folder(folder).keys()


def check_scheduler(file: Path) -> Pairs:
    """Noise and target of every timestep, beside diffusers' scheduler of the same file."""
    import diffusers
    import torch

    from megatron_pulse.integration.checkpoint.saved_run import read_saved_run

    said, process = plain(file), read_saved_run(Path("new")).process
    theirs = getattr(diffusers, said["_class_name"]).from_config(said)
    steps, kind = int(theirs.config.num_train_timesteps), theirs.config.get("prediction_type")
    kind = {"v_prediction": "v", "flow_prediction": "flow"}.get(kind, kind)
    kind = "flow" if "Flow" in said["_class_name"] else kind
    yield [steps, kind], [process.num_timesteps, process.objective]
    if kind == "flow":
        shift = theirs.config.get("shift", theirs.config.get("flow_shift"))
        yield shift, shift if theirs.config.get("use_dynamic_shifting") else process.shift
        return
    one, zero = torch.ones(steps, 1, 1, 1), torch.zeros(steps, 1, 1, 1)
    times, kept = torch.arange(steps, dtype=torch.float32), theirs.alphas_cumprod.double()
    targets = {  # of (x_0, noise): Ho et al. 2020; itself; Salimans & Ho 2022
        "epsilon": (0 * kept, 0 * kept + 1),
        "sample": (0 * kept + 1, 0 * kept),
        "v": (-((1 - kept) ** 0.5), kept**0.5),
    }[kind]
    for pair, noised, target in (
        ((one, zero), kept**0.5, targets[0]),
        ((zero, one), (1 - kept) ** 0.5, targets[1]),
    ):
        for got, expected in zip(process.noised(*pair, times), (noised, target), strict=True):
            got = got.flatten().double()  # Euler's zero SNR is 2^-24
            yield True, torch.allclose(got, expected, rtol=1e-5, atol=3e-4)


def check_events(file: Path) -> Pairs:
    """No value that was not written."""
    read = plain(Path("loss.json"))["training"]
    for step, value in zip(read["steps"], read["values"], strict=True):
        yield True, step in range(20) and math.isclose(value, 1 / (step + 1), rel_tol=1e-6)


@dataclass(frozen=True)
class Target:
    """File that ``make`` writes, commands that read it, and the check of what they accept.

    A ``heavy`` one needs torch. Of one that is ``hashed`` no flipped bit may be accepted.
    """

    file: str
    check: Callable[[Path], Pairs]
    commands: tuple[str, ...]
    heavy: bool = False
    hashed: bool = False


_SEARCH = "--seconds 0.3 --solver none"
_TUNE = f"tune --profile profile.json --global-batch-size 16 --micro-batch-size 2 {_SEARCH}"
_TIMES = "schedule --times times.json -p 2 -m 4"
_SCHEDULE = f"schedule --profile profile.json -p 2 -m 4 {_SEARCH} --no-cache"
_COMPARE = "compare plan.json trace.json"
_VERIFY = "data info latents:latents --verify"
_CAPTIONS = "data info captions:captions --image-size 8"
_IMPORT = ("import --from pipeline --to new",)
_MODEL = "pipeline/transformer"
_STORED = ("checkpoint verify saved", "export --load saved --to exported/model.safetensors")


def _shown(command: str, *files: str) -> tuple[str, ...]:
    return tuple(f"{command} -o {file}" for file in files)


TARGETS: dict[str, Target] = {
    "plan": Target(
        "plan.json",
        check_plan,
        ("show plan.json --grid", *_shown("show plan.json", "p.svg", "p.html", "p.json"),
         f"{_COMPARE} --json"),
        hashed=True,
    ),
    "plan and backbone": Target(
        "plan.json", check_plan_of_backbone, ("check plan.json",), hashed=True
    ),
    "plan of a run": Target(
        "plan.json", check_plan_of_backbone, ("obey plan.json",), heavy=True, hashed=True
    ),
    "profile": Target(
        "profile.json",
        rewritten(load_profile, save_profile),
        ("partition --profile profile.json -p 2 --draw p.svg", _SCHEDULE,
         f"{_TUNE} --cluster cpu -o made.json",
         f"{_COMPARE} --profile profile.json --write-profile w.json"),
        hashed=True,
    ),
    "table": Target(
        "table.json", check_table,
        ("profile --from-table table.json --preset V100-32GB -o made.json",),
    ),
    "times": Target(
        "times.json", check_times,
        tuple(f"{_TIMES} {_SEARCH} --no-cache{more}" for more in ("", " --split", " --draw t.svg")),
    ),
    "cluster": Target(
        "cluster.yaml", check_cluster,
        ("clusters cluster.yaml", f"{_TUNE} --cluster cluster.yaml"), hashed=True,
    ),
    "encoders": Target(
        "encoders.json", check_encoders,
        (f"{_TUNE} --cluster cpu --encoders encoders.json",), hashed=True,
    ),
    "trace": Target(
        "trace.json", rewritten(load_trace, save_trace),
        (_COMPARE, *_shown(_COMPARE, "c.svg", "c.html")), hashed=True,
    ),
    "order": Target("order.csv", check_order, (f"{_TIMES} --schedule order.csv",)),
    "latents": Target(
        "latents/meta.json", check_latents, ("data info latents:latents", _VERIFY), True, True
    ),
    "rows of latents": Target("latents/latent-00000.npy", check_latents, (_VERIFY,), True, True),
    "null conditioning": Target("latents/null-context.npy", check_latents, (_VERIFY,), True, True),
    "hashes of rows": Target("latents/hashes-00001.bin", check_latents, (_VERIFY,), True, True),
    **{
        f"checkpoint's {file}": Target(
            f"saved/release/{file}", check_nothing, _STORED, heavy=True, hashed=True
        )
        for file in ("metadata.json", ".metadata", "__0_0.distcp")
    },
    "newest checkpoint's name": Target(
        "saved/latest_checkpointed_iteration.txt", check_nothing, _STORED[:1], True, True
    ),
    "captions": Target("captions/metadata.jsonl", check_captions, (_CAPTIONS,), heavy=True),
    "picture": Target("captions/1.png", check_captions, (f"{_CAPTIONS} --verify",), heavy=True),
    "weights": Target(
        f"{_MODEL}/diffusion_pytorch_model-00002-of-00005.safetensors", check_model, _IMPORT, True
    ),
    "model": Target(f"{_MODEL}/config.json", check_model, _IMPORT, heavy=True),
    "scheduler": Target(
        "pipeline/scheduler/scheduler_config.json", check_scheduler, _IMPORT, heavy=True
    ),
    "index": Target(
        f"{_MODEL}/diffusion_pytorch_model.safetensors.index.json", check_model, _IMPORT, True
    ),
    "events": Target(
        "events/a.tfevents.0", check_events,
        ("curve --tensorboard-dir events -o loss.png",), heavy=True,
    ),
}  # fmt: skip
"""By name; every one is drawn as often."""


def make(folder: Path, heavy: bool) -> None:
    """Write a sound file of each kind, all of one small model."""
    plan = small_plan()
    save_plan(plan, folder / "plan.json")
    save_profile(small_profile(), folder / "profile.json")
    save_trace(trace_of(plan, [plan.simulate_step().timeline] * 2), folder / "trace.json")
    save_cluster(cluster("cpu"), folder / "cluster.yaml", "A cluster")
    layers = tuple(FrozenLayer(f"layers.{i}", {1: 1e-3, 8: 6e-3}, 1e3, 1e2, 1e2) for i in range(3))
    origin = EncoderOrigin("small", {"depth": 3}, "cpu", "measured", 1, {"text": "float32"})
    encoders = EncoderTable(component_records([Component("text", layers, (), 1e2, (0, 1))]), origin)
    write_with_checksum(folder / "encoders.json", json.dumps(encoders.record()) + "\n")
    shape = {"saved_act_bytes": 4096, "out_shapes": [[16, 8]], "out_numel": 128}
    work = {"flops_fwd": 10**9, "flops_bwd": 2 * 10**9}
    units = [{"name": f"unit {i}", "params": 1000 * (i + 1), **work, **shape} for i in range(8)]
    skips = [{"id": "a", "src": 1, "dst": 6, "numel": 64}]
    stages = {"forward": [1, 2.5, 2, 1], "input_grad": [1, 2, 2, 1], "weight_grad": [1, 2, 2, 1]}
    times = {**stages, "link": [0.1, 0, 0.1], "activation": [1, 1, 2, 1]}
    table = {"name": "ours", "units": units, "skips": skips}
    for name, value in (("table.json", table), ("times.json", times)):
        (folder / name).write_text(json.dumps(value, indent=1))
    (folder / "order.csv").write_text(to_csv(plan.schedule))
    if heavy:
        _make_heavy(folder)


def _make_heavy(folder: Path) -> None:
    """Latents, captions, a tiny DiT as diffusers stores it, a checkpoint of it, TensorBoard's."""
    import torch
    from diffusers import DDIMScheduler, DiTTransformer2DModel
    from PIL import Image
    from torch.utils.tensorboard import SummaryWriter

    from megatron_pulse.data.dataset import FieldSpec
    from megatron_pulse.data.latents.layout import LatentLayout
    from megatron_pulse.data.latents.writer import LatentWriter

    torch.set_num_threads(1)
    fields = {"context": FieldSpec((2, 3), "compute")}
    layout = LatentLayout((4, 2, 2), 3, fields=fields, shard_size=4)
    with LatentWriter(folder / "latents", layout, nulls={"context": torch.zeros(2, 3)}) as writer:
        for i in range(6):
            writer.add(torch.full((4, 2, 2), float(i)), i % 3, {"context": torch.ones(2, 3)})
    (folder / "captions").mkdir()
    lines = []
    for i, text in enumerate(("a red bird", "两只鸟", "🙂 smile")):
        Image.new("RGB", (8, 8), (60 * i, 0, 0)).save(folder / f"captions/{i}.png")
        lines.append(json.dumps({"file_name": f"{i}.png", "text": text}) + "\n")
    (folder / "captions/metadata.jsonl").write_text("".join(lines))
    torch.manual_seed(0)
    DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=4,
        num_embeds_ada_norm=10, out_channels=8,
    ).save_pretrained(folder / _MODEL, max_shard_size="20KB")  # fmt: skip
    DDIMScheduler().save_pretrained(folder / "pipeline/scheduler")
    # In a process of its own: a saved checkpoint leaves process groups behind.
    words = [sys.executable, "-m", "megatron_pulse.cli", "import", "--from", "pipeline"]
    subprocess.run([*words, "--to", "saved"], cwd=folder, check=True, capture_output=True)
    with SummaryWriter(str(folder / "events")) as events:
        for step in range(20):
            events.add_scalar("loss", 1 / (step + 1), step)
    next((folder / "events").iterdir()).rename(folder / "events/a.tfevents.0")
