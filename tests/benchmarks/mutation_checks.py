"""Whether what a command accepted is what the file says, found by other means than its reader."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import yaml

from megatron_pulse.files import HASH
from megatron_pulse.planner.bubble_fill.encoder_table import (
    EncoderTable,
    component_records,
    components_of,
    read_table,
)
from megatron_pulse.planner.cluster.cluster import load_cluster, to_record
from megatron_pulse.planner.plan_file.plan_file import save_plan
from megatron_pulse.planner.trace.trace import load_trace, save_trace
from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from megatron_pulse.profile.files import load_profile, save_profile


def _plain(path: Path) -> Any:
    """JSON as the standard library reads it, refusing what JSON has not, without our hash."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({k for k, _ in pairs}) == len(pairs), "a key is there twice"
        return dict(pairs)

    def never(text: str) -> Any:
        raise AssertionError(f"{text} is no JSON")

    said = json.loads(
        path.read_bytes().decode("utf-8-sig"), object_pairs_hook=once, parse_constant=never
    )
    if isinstance(said, dict):
        said.pop(HASH, None)
    return said


def differences(said: Any, read: Any, where: str = "") -> list[str]:
    """Where two JSON values differ; 1 and 1.0 are the same number, true and 1 are not."""
    if isinstance(said, dict) and isinstance(read, dict):
        keys = {str(k) for k in (*said, *read)}
        ours, theirs = ({str(k): v for k, v in d.items()} for d in (said, read))
        return [
            line
            for key in sorted(keys)
            for line in (
                differences(ours[key], theirs[key], f"{where}.{key}")
                if key in ours and key in theirs
                else [f"{where}.{key} only {'said' if key in ours else 'read'}"]
            )
        ]
    if isinstance(said, list) and isinstance(read, list | tuple):
        if len(said) != len(read):
            return [f"{where}: {len(said)} said, {len(read)} read"]
        pairs = enumerate(zip(said, read, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{where}.{i}")]
    same = said == read and isinstance(said, bool) == isinstance(read, bool)
    return [] if same else [f"{where}: {said!r:.60} said, {read!r:.60} read"]


def check_plan(folder: Path) -> list[str]:
    """The plan as a run takes it, and what its parts say of each other."""
    said = _plain(folder / "plan.json")
    save_plan(load_checked(folder / "plan.json"), folder / "again.json")
    found = differences(said, _plain(folder / "again.json"))
    order, stages = said["schedule"]["order"], said["stages"]
    done = [op for row in order for op in row]
    kinds = "FIW" if said["times"]["weight_grad"] else "FB"
    count = said["schedule"]["num_microbatches"]
    wanted = {f"{k}{s}:{m}" for k in kinds for s in range(len(stages)) for m in range(count)}
    extra = {f"X{i}:{j}" for i, f in enumerate(said["schedule"]["bubble_tasks"])
             for j in range(len(f["slice_seconds"]))}  # fmt: skip
    home = said["schedule"]["device_of_stage"]
    facts = {
        "operations": len(done) == len(set(done)) and set(done) == wanted | extra,
        "devices": all(
            home[int(op[1:].split(":")[0])] == d
            for d, row in enumerate(order)
            for op in row
            if op[0] != "X"
        ),
        "placement": said["placement"] == said["schedule"]["placement"],
        "batch": said["global_batch_size"] == said["data"] * said["micro_batch_size"] * count,
        "degrees": len(order) == said["pipeline"]
        and len(stages) == said["pipeline"] * said["num_chunks"],
        "layers": len({n for s in stages for n in s}) == sum(map(len, stages)),
        "figures": all(
            math.isfinite(v) and v >= -1e-9
            for v in said["predicted"].values()
            if isinstance(v, int | float)
        ),
        "throughput": math.isclose(
            said["predicted"]["samples_per_s"] * said["predicted"]["step_s"],
            said["global_batch_size"],
            rel_tol=0.02,
        ),
    }
    return found + [f"{what} contradict each other" for what, fits in facts.items() if not fits]


def check_plan_of_backbone(folder: Path) -> list[str]:
    """That, and the layers of the backbone that it names."""
    from model_specs import load_backbone

    said = _plain(folder / "plan.json")
    backbone = load_backbone(said["backbone"]["name"], said["backbone"]["options"])
    names = [name for stage in said["stages"] for name in stage]
    found = [] if names == [layer.name for layer in backbone.layers] else ["layers are others"]
    return check_plan(folder) + found + differences(said["backbone"], dict(backbone.record))


def check_profile(folder: Path) -> list[str]:
    """The profile, written again."""
    said = _plain(folder / "profile.json")
    save_profile(load_profile(folder / "profile.json"), folder / "again.json")
    return differences(said, _plain(folder / "again.json"))


def check_trace(folder: Path) -> list[str]:
    """The trace, written again."""
    said = _plain(folder / "trace.json")
    save_trace(load_trace(folder / "trace.json"), folder / "again.json")
    return differences(said, _plain(folder / "again.json"))


def check_cluster(folder: Path) -> list[str]:
    """The cluster as PyYAML reads it where YAML 1.1 and 1.2 agree."""
    text = (folder / "cluster.yaml").read_bytes().decode("utf-8-sig")
    found = to_record(load_cluster(folder / "cluster.yaml"))
    said = yaml.load(text, yaml.BaseLoader)  # every value as it is written
    said.pop(HASH, None)

    def fits(written: Any, read: Any) -> bool:
        if isinstance(read, dict):
            return written.keys() == read.keys() and all(fits(written[k], read[k]) for k in read)
        if isinstance(read, str):
            return bool(written == read or os.path.basename(written) == os.path.basename(read))
        return bool(float(written) == read)

    for name in ("usable_memory", "all_reduce_efficiency"):
        if name in said and float(said[name]) == 1:
            del said[name]
    return [] if fits(said, found) else [f"{said} said, {found} read"]


def check_encoders(folder: Path) -> list[str]:
    """The components, written again."""
    said = _plain(folder / "encoders.json")
    read = read_table(folder / "encoders.json")
    again = EncoderTable(component_records(components_of(read.components)), read.origin).record()
    return differences(said, json.loads(json.dumps(again)))


def check_nothing(folder: Path) -> list[str]:
    """Of files that are refused whatever is changed."""
    return []


def check_table(folder: Path) -> list[str]:
    """The profile that was made of the table."""
    said, made = _plain(folder / "table.json"), load_profile(folder / "made.json")
    read = [(layer.name, layer.parameters) for layer in made.layers]
    found = [] if read == [(u["name"], u["params"]) for u in said["units"]] else ["other units"]
    ends = [(s.source, s.destination, s.num_bytes) for s in made.skips]
    wanted = [(s["src"], s["dst"], 2 * s["numel"]) for s in said["skips"]]
    return found + ([] if ends == wanted else [f"skips: {wanted} said, {ends} read"])


def check_times(folder: Path) -> list[str]:
    """What the schedule was made for."""
    from megatron_pulse.cli.plan.schedule_input import from_times

    said = _plain(folder / "times.json")
    task = from_times(argparse.Namespace(
        times=folder / "times.json", num_devices=2, microbatches=4, placement=None, waves=None,
        cap=None,
    ))  # fmt: skip
    read = {"forward": task.whole.forward}
    if task.split is not None:
        read["input_grad"], read["weight_grad"] = task.split.backward, task.split.weight_grad
    if "backward" in said:
        read["backward"] = task.whole.backward
    if "activation" in said:
        read["activation"] = task.whole.activation
    if "link" in said:
        read["link"] = task.whole.link
    return differences(said, read)


def check_order(folder: Path) -> list[str]:
    """The cells as they are written, and each operation once."""
    text = (folder / "order.csv").read_bytes().decode("utf-8-sig")
    said = [[c.strip().strip('"').strip() for c in line.split(",")] for line in text.splitlines()]
    said = [[c for c in row if c] for row in said]
    cells = [
        re.sub(r"^([FBIWR])(\d+):(\d+)$", lambda m: f"{m[2]}{m[1]}{m[3]}", c)
        for row in said
        for c in row
    ]
    numbers = [re.fullmatch(r"0*(\d+)([FBIWR])0*(\d+)", c) for c in cells]
    if not all(numbers):
        return ["a cell is no operation"]
    done = [(m[2], int(m[1]), int(m[3])) for m in numbers if m]
    kinds, stages = {k for k, _, _ in done}, {s for _, s, _ in done}
    wanted = {(k, s, m) for k in kinds for s in stages for m in range(4)}
    return [] if len(done) == len(set(done)) and set(done) == wanted else ["not each once"]


def check_latents(folder: Path) -> list[str]:
    """``meta.json``, written again."""
    from megatron_pulse.data.latents.layout import Meta

    said = _plain(folder / "latents/meta.json")
    read = json.loads(json.dumps(Meta.load(folder / "latents").to_dict()))
    return differences(said, read)


def check_captions(folder: Path) -> list[str]:
    """The captions, line by line; behind them come pictures that no line names."""
    from megatron_pulse.data.images.metadata import read_captions

    texts = [text for _, text in read_captions(folder / "captions").pairs]
    lines = (folder / "captions/metadata.jsonl").read_bytes().decode("utf-8-sig").split("\n")
    records = [json.loads(line, strict=False) for line in lines if line.strip()]
    said = [record.get("text") or "" for record in records]
    return differences(said, texts[: len(said)])


def check_model(folder: Path) -> list[str]:
    """The backbone's own account of itself against the published configuration."""
    from megatron_pulse.diffusion.published import read_config, read_folder
    from model_specs import load_published, published_form

    transformer = folder / "pipeline/transformer"
    said = _plain(transformer / "config.json")
    form = published_form(load_published(read_config(transformer)))
    assert form is not None
    found = [
        line
        for key, value in form.config.items()
        if key in said and said[key] is not None
        for line in differences(said[key], value, key)
    ]
    index = _plain(transformer / "diffusion_pytorch_model.safetensors.index.json")["weight_map"]
    names = read_folder(transformer).keys()
    return found + ([] if names >= index.keys() else ["tensors of the index are missing"])


def check_scheduler(folder: Path) -> list[str]:
    """The noise and the target of every timestep, against diffusers' scheduler of the same file."""
    import diffusers
    import torch

    from megatron_pulse.integration.checkpoint.saved_run import read_saved_run

    said = _plain(folder / "pipeline/scheduler/scheduler_config.json")
    process = read_saved_run(folder / "new").process
    theirs = getattr(diffusers, said["_class_name"]).from_config(said)
    steps = int(theirs.config.num_train_timesteps)
    if process.num_timesteps != steps:
        return [f"{steps} timesteps said, {process.num_timesteps} read"]
    kind = "flow" if "Flow" in said["_class_name"] else theirs.config.prediction_type
    kinds = {"v_prediction": "v", "flow_prediction": "flow"}
    if (kind := kinds.get(kind, kind)) != process.objective:
        return [f"the prediction {kind} said, {process.objective} read"]
    if kind == "flow":
        shift = theirs.config.get("shift", theirs.config.get("flow_shift"))
        dynamic = bool(theirs.config.get("use_dynamic_shifting"))
        return [] if dynamic or shift == process.shift else [f"shift: {shift}, {process.shift}"]
    one, zero = torch.ones(steps, 1, 1, 1), torch.zeros(steps, 1, 1, 1)
    times = torch.arange(steps, dtype=torch.float32)
    (signal, to_noise), (noise, of_noise) = (
        [part.flatten().double() for part in process.noised(*pair, times)]
        for pair in ((one, zero), (zero, one))
    )
    kept = theirs.alphas_cumprod.double()
    targets = {  # of (x_0, noise): Ho et al. 2020; itself; Salimans & Ho 2022
        "epsilon": (0 * kept, 0 * kept + 1),
        "sample": (0 * kept + 1, 0 * kept),
        "v": (-((1 - kept) ** 0.5), kept**0.5),
    }[kind]
    found = {
        "signal": (signal, kept**0.5),
        "noise": (noise, (1 - kept) ** 0.5),
        "target's signal": (to_noise, targets[0]),
        "target's noise": (of_noise, targets[1]),
    }
    return [
        f"{what} is another by {(a - b).abs().max():.3g}"
        for what, (a, b) in found.items()
        if not torch.allclose(a, b, rtol=1e-5, atol=3e-4)  # Euler's zero SNR is 2^-24
    ]


def check_events(folder: Path) -> list[str]:
    """No value that was not written."""
    read = _plain(folder / "loss.json")["training"]
    known = {step: 1 / (step + 1) for step in range(20)}
    wrong = [s for s, v in zip(read["steps"], read["values"], strict=True)
             if not math.isclose(v, known.get(s, math.nan), rel_tol=1e-6)]  # fmt: skip
    return [f"steps {wrong} have other values"] if wrong else []
