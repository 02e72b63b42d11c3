"""Model card of an export, with YAML front matter as the Hugging Face hub reads it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_pulse.backbone.appended_fields import REFERENCE_IMAGE
from megatron_pulse.backbone.published_weights import Published
from megatron_pulse.data.images.inpainting import reads_masks
from megatron_pulse.dataclass_flags import RECIPE
from megatron_pulse.diffusion.hub import HUB_NAME
from megatron_pulse.diffusion.published import CARD
from megatron_pulse.encoders.first_frame import starts_from_frame
from megatron_pulse.errors import UserError
from megatron_pulse.integration.checkpoint.saved_run import SavedRun
from megatron_pulse.planner.plan_file.certificate import certificate_path, load_verification
from megatron_pulse.planner.plan_file.plan_file import read_plan
from megatron_pulse.profile.trainable import trained_part
from model_specs import text_recipe

PLAN = "plan.json"
_HUB_CACHE = re.compile(r"models--([^/]+)--([^/]+)/snapshots/")
_LICENCE = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class Export:
    """Subject of a card: what was exported, from which weights, and the base of the pipeline."""

    saved: SavedRun
    published: Published
    averaged: bool
    dtype: str
    base: Path | None = None
    """Folder of the base pipeline."""
    pipeline_class: str = ""
    """Class of the exported pipeline; empty if the backbone alone is exported."""
    adapter_format: str = ""
    """Format of an adapter that is exported alone."""


def model_card(export: Export) -> str:
    """Text of the card."""
    saved = export.saved
    front = yaml.safe_dump(_front_matter(export), sort_keys=False, allow_unicode=True)
    name = str(saved.record["name"])
    lines = ["---", front.rstrip(), "---", "", f"# {_title(name)}, {_state(saved)}", ""]
    lines += ["| trained with megatron_pulse | |", "|---|---|"]
    lines += [f"| {key} | {_cell(value)} |" for key, value in _facts(export) if value]
    lines += ["", "## Sampling", "", *_sampling(export)]
    if planned := list(_plan_lines(saved)):
        lines += ["", "## Parallel plan", "", "```", *planned, "```"]
    if (recipe := _recipe(saved)) is not None:
        lines += ["", "## Recipe", "", "```toml", recipe.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def hub_name(folder: Path) -> str | None:
    """OWNER/NAME of a folder in huggingface_hub's cache; None for other folders."""
    found = _HUB_CACHE.search(f"{folder}/")
    return f"{found[1]}/{found[2]}" if found else None


def _front_matter(export: Export) -> dict[str, Any]:
    front: dict[str, Any] = {"library_name": "diffusers"}
    if export.base is not None:
        said = _front_matter_of(export.base / CARD)
        base = hub_name(export.base) or said.get("base_model")
        if isinstance(base, str) and HUB_NAME.fullmatch(base):
            front["base_model"] = base
        front |= {key: said[key] for key in _LICENCE if isinstance(said.get(key), str)}
    elif (frozen := export.saved.frozen_weights) is not None and not frozen.imported:
        base = hub_name(Path(frozen.folder))
        front |= {"base_model": base, "base_model_relation": "adapter"} if base else {}
    front["pipeline_tag"] = _task(export.saved)
    front["tags"] = ["diffusers", "diffusers-training", "megatron_pulse"]
    front["tags"] += ["lora"] * bool(export.adapter_format)
    return front


def _task(saved: SavedRun) -> str:
    """Task of the model, by its name on the hub."""
    backbone = saved.load_backbone()
    video = len(backbone.sample_spec.shape) == 4
    try:
        reads_text = text_recipe(str(saved.record["name"]), backbone) is not None
    except ValueError:  # text states of unknown encoders
        reads_text = True
    if starts_from_frame(backbone.batch_fields):
        return "image-to-video"
    if reads_masks(backbone.batch_fields) or REFERENCE_IMAGE in backbone.batch_fields:
        return "image-to-image"
    if reads_text:
        return "text-to-video" if video else "text-to-image"
    return "unconditional-image-generation"


def _front_matter_of(card: Path) -> Mapping[str, Any]:
    """YAML at the head of a card; empty without a readable one."""
    try:
        text = card.read_text(encoding="utf-8")
        _, head, _ = re.split(r"^---\s*$", text, maxsplit=2, flags=re.MULTILINE)
        found = yaml.safe_load(head)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _title(name: str) -> str:
    return Path(name.partition(":")[2]).name or name if ":" in name else name


def _state(saved: SavedRun) -> str:
    return "converted" if saved.released else f"{saved.iteration:,} steps"


def _facts(export: Export) -> Iterator[tuple[str, str]]:
    saved, args = export.saved, export.saved.arguments
    yield "backbone", f"{saved.record['name']} ({export.published.class_name})"
    yield "process", saved.process.describe()
    if saved.released:
        return
    yield "steps", f"{saved.iteration:,}, {saved.num_samples:,} samples"
    yield "batch", f"{args.global_batch_size} samples"
    yield "learning rate", f"{args.lr:g}, {args.lr_decay_style}, {args.optimizer}"
    yield "data", str(args.pulse_data or "")
    yield "encoders", str(getattr(args, "pulse_encoders", None) or "")
    yield "trained", str(trained_part(saved.record))
    yield "frozen weights", saved.frozen_weights.folder if saved.frozen_weights else ""
    numbers = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    yield "numbers", f"{numbers}, main weights fp32"
    weights = f"EMA (decay {args.pulse_ema_decay:g})" if export.averaged else "as trained"
    yield "weights here", f"{weights}, {export.dtype}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _sampling(export: Export) -> list[str]:
    if export.adapter_format == "peft":
        loads = "model = PeftModel.from_pretrained(MODEL, FOLDER)"
        return ["```python", "from peft import PeftModel", "", loads, "```"]
    if export.adapter_format and export.saved.record["adapter"]["type"] == "lokr":
        return ["ComfyUI and LyCORIS read it."]
    if export.adapter_format:
        return [
            "```python", "from diffusers import DiffusionPipeline", "",
            "pipeline = DiffusionPipeline.from_pretrained(BASE)",
            "pipeline.load_lora_weights(FOLDER)", "```",
        ]  # fmt: skip
    if not export.pipeline_class:
        loads = f"from diffusers import {export.published.class_name}"
        made = f"{export.published.class_name}.from_pretrained(FOLDER)"
        return ["```python", loads, "", f"backbone = {made}", "```"]
    prompt = '"a prompt"' if _task(export.saved).startswith("text") else ""
    result = "frames[0]" if _task(export.saved).endswith("video") else 'images[0].save("0.png")'
    call = f"pipeline({prompt}).{result}"
    return [
        "```python", "from diffusers import DiffusionPipeline", "",
        f"pipeline = DiffusionPipeline.from_pretrained(FOLDER)  # {export.pipeline_class}",
        call, "```",
    ]  # fmt: skip


def _recipe(saved: SavedRun) -> str | None:
    try:
        return (saved.folder.parent.parent / RECIPE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _plan_lines(saved: SavedRun) -> Iterator[str]:
    """Plan of the run in a few lines, with the schedule's certificate; none without a plan."""
    args = saved.arguments
    ranks = f"{getattr(args, 'world_size', 1)} rank(s)"
    found = None
    for path in (getattr(args, "pulse_plan", None), saved.folder.parent / PLAN):
        if path is None or not Path(path).is_file():
            continue
        try:
            _, found, _ = read_plan(path)
        except UserError:
            continue
        if found is not None:
            break
    if found is None:
        if not saved.released:
            pipeline = getattr(args, "pipeline_model_parallel_size", 1)
            tensor = getattr(args, "tensor_model_parallel_size", 1)
            context = getattr(args, "context_parallel_size", 1)
            of_context = f" x context {context}" if context > 1 else ""
            yield f"{ranks}: pipeline {pipeline} x tensor {tensor}{of_context}"
        return
    made = found.provenance["schedule"]
    yield found.heading
    yield (
        f"batch {found.global_batch_size} = {found.data} replica(s) x {found.num_microbatches} "
        f"microbatch(es) of {found.micro_batch_size}, {found.dtype}"
    )
    if found.shapes:
        yield f"buckets, of one per step: {found.microbatches}"
    known = "optimal for this partition" if made["proved"] else f"gap {100 * made['gap']:.2f} %"
    yield f"schedule: {known}; bubble {100 * found.predicted['bubble']:.1f} %"
    certificate = certificate_path(Path(path))  # type: ignore[arg-type]
    if certificate.is_file():
        try:
            yield f"verified: {load_verification(certificate).lines()[0]}"
        except UserError:
            return
