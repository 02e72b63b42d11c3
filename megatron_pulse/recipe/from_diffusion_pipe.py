"""Conversion of diffusion-pipe's two TOML files (configuration and dataset) to a recipe.

Keys without a counterpart are listed with the reason, as comments of the recipe. Keys of
diffusion-pipe as of November 2026.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_pulse.errors import UserError
from megatron_pulse.recipe.keys import TABLES
from megatron_pulse.recipe.read import to_toml

_SAME = {
    "steps_per_print": "log.every",
    "gradient_clipping": "optimizer.clip_grad",
    "warmup_steps": "optimizer.warmup_steps",
    "lr_scheduler": "optimizer.schedule",
    "max_steps": "training.steps",
    "micro_batch_size_per_gpu": "training.micro_batch_size",
    "eval_every_n_steps": "validation.every",
    "save_every_n_steps": "checkpoint.every",
    "uncond_fraction": "training.dropout",
    "output_dir": "output",
    "optimizer.lr": "optimizer.lr",
    "optimizer.betas": "optimizer.betas",
    "optimizer.eps": "optimizer.eps",
    "optimizer.weight_decay": "optimizer.weight_decay",
    "optimizer.momentum": "optimizer.momentum",
    "model.diffusers_path": "model.weights",
    "adapter.rank": "adapter.rank",
    "adapter.alpha": "adapter.alpha",
    "adapter.dropout": "adapter.dropout",
    "adapter.init_from_existing": "adapter.weights",
    "model.timestep_sample_method": "process.timestep_density",
    "model.shift": "process.flow_shift",
    "monitoring.wandb_tracker_name": "log.wandb_project",
    "monitoring.wandb_run_name": "log.wandb_name",
}
"""Keys with the same values under another name."""

_IN_STEPS = "counted in steps here: give {} a number of steps"
_BUCKETS = "buckets auto have aspect ratios of 1:2 to 2:1; data.buckets may list others"
_CAPTIONS = "data.shuffle_tags draws another order at every visit"
_STEP = 32
"""Multiple of the sides of diffusion-pipe's buckets, in pixels."""
_PLANNED = "the plan decides it, by memory and measured times"
_FOLDER = "weights are read from a diffusers folder: model.weights, encoders.folder"
_FILE = f"{_FOLDER}. 'pulse unpack FILE --config DIR --to FOLDER' makes one of a single file"
_FP8 = ("float8", "float8_e4m3fn")
_QUANTIZED = "weights are not quantised to it; below an adapter, quantization.type is there"
_WITHOUT = {
    "eval_every_n_epochs": _IN_STEPS.format("validation.every"),
    "eval_every_n_examples": _IN_STEPS.format("validation.every"),
    "eval_before_first_step": "the first evaluation is at step validation.every",
    "eval_micro_batch_size_per_gpu": "validation uses the microbatch size of training",
    "eval_gradient_accumulation_steps": "validation uses the global batch size; validation.batches",
    "image_micro_batch_size_per_gpu": "all samples have one microbatch size",
    "image_eval_micro_batch_size_per_gpu": "all samples have one microbatch size",
    "save_every_n_epochs": _IN_STEPS.format("checkpoint.every"),
    "save_every_n_examples": _IN_STEPS.format("checkpoint.every"),
    "checkpoint_every_n_epochs": _IN_STEPS.format("checkpoint.every"),
    "checkpoint_every_n_minutes": _IN_STEPS.format("checkpoint.every"),
    "reentrant_activation_checkpointing": "recomputation is not torch's here",
    "partition_method": _PLANNED,
    "partition_split": _PLANNED,
    "save_dtype": "checkpoints are fp32; 'pulse export --dtype' writes others",
    "caching_batch_size": "'pulse data write-latents' stores latents",
    "map_num_proc": "data.workers read samples",
    "video_clip_mode": "video data is not supported",
    "disable_block_swap_for_eval": "weights on the host are copied in validation too",
    "compile": "torch.compile is not used",
    "force_constant_lr": "optimizer.lr may change at a resume",
    "x_axis_examples": "trackers count steps",
    "logging_steps": "as steps_per_print",
    "resume_from_checkpoint": "the same command resumes from the newest checkpoint",
    "regenerate_cache": "edited pictures are noticed",
    "adapter.type": "lora is converted; others here are dora and lokr",
    "adapter.dtype": "an adapter's main weights are fp32",
    "monitoring.wandb_api_key": "'wandb login' keeps it",
    "monitoring.enable_wandb": "log.wandb_project turns it on",
    "model.transformer_dtype": _QUANTIZED,
    "model.diffusion_model_dtype": _QUANTIZED,
    "model.guidance": "Flux trains at the guidance of its configuration",
    "model.v_pred": "the process is that of the weights; process.objective = 'v' sets it",
    "model.unet_lr": "one learning rate for all weights: optimizer.lr",
    "model.text_encoder_1_lr": "text encoders are frozen",
    "model.text_encoder_2_lr": "text encoders are frozen",
    "model.cache_text_embeddings": "'pulse data write-latents' stores text states",
    "model.cfg": "distillation is not trained",
    "model.image_shift": "one shift for all samples",
    "model.merge_adapters": "merge them before, with diffusers' fuse_lora",
    "optimizer.gradient_release": "gradients are summed over microbatches",
    "optimizer.stabilize": "Adam is Megatron's",
    "dataset.resolutions": "data.resolution is one number for all pictures",
    "dataset.directory.resolutions": "data.resolution is one number for all pictures",
    "dataset.enable_ar_bucket": _BUCKETS,
    "dataset.min_ar": _BUCKETS,
    "dataset.max_ar": _BUCKETS,
    "dataset.num_ar_buckets": _BUCKETS,
    "dataset.ar_buckets": _BUCKETS,
    "dataset.size_buckets": _BUCKETS,
    "dataset.frame_buckets": "video data is not supported",
    "dataset.cache_shuffle_num": _CAPTIONS,
    "dataset.cache_shuffle_delimiter": "tags are separated by commas",
    "dataset.shuffle_tags": "data.shuffle_tags holds for all sources",
    "dataset.caption_prefix": "it is a text",
    "dataset.num_repeats": "it is a whole number",
    "dataset.skip_empty_caption": "data.default_caption is the caption of pictures without one",
    "dataset.directory.mask_path": "data.masks is the folder of masks of a single source",
    "dataset.directory.control_path": "control pictures lie in PATH.conditioning here (ControlNet)",
}
"""Keys without a counterpart, with the reason or what there is in their place."""

_FAMILIES = ("sdxl", "flux", "sd3")
"""Types of models whose diffusers folder is a family here; others are traced."""
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_ADAM = ("adam", "adamw", "adamw_optimi", "adamw8bitkahan", "adamw8bit", "stableadamw")
_FILES = ("diffusion_model", "vae", "audio_vae", "text_encoders")
"""Keys of files, beside those that end in _path."""


@dataclass
class _Conversion:
    """Tables of the recipe made so far, and what was left out."""

    tables: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any) -> None:
        table, _, name = key.rpartition(".")
        (self.tables.setdefault(table, {}) if table else self.tables)[name] = value

    def leave_out(self, key: str, value: Any, reason: str) -> None:
        shown = repr(value) if not isinstance(value, dict | list) else "..."
        self.left_out.append(f"{key} = {shown}: {reason}")


def converted(path: Path) -> str:
    """Recipe, as TOML text, of a configuration of diffusion-pipe; raises UserError.

    The dataset file is looked for as named, and beside the configuration.
    """
    config, made = _read(path), _Conversion()
    made.set("output", "runs/from-diffusion-pipe")
    made.set("parallel.auto", True)
    special: Mapping[str, Callable[[_Conversion, dict[str, Any]], None]] = {
        "model": functools.partial(_model, is_adapted=_is_lora(config.get("adapter"))),
        "optimizer": _optimizer,
        "monitoring": _monitoring,
        "adapter": _adapter,
    }
    _batch(made, config)
    for key, value in config.items():
        if key in special and isinstance(value, dict):
            special[key](made, value)
        elif key == "dataset":
            _dataset(made, path, str(value))
        elif key == "eval_datasets" and value:
            _validation(made, path, value)
        elif key == "pipeline_stages" and value > 1:
            made.set("parallel.pipeline", value)
        elif key in ("pipeline_stages", "activation_checkpointing"):
            made.leave_out(key, value, _PLANNED)
        elif key == "blocks_to_swap":
            if value:
                made.set("parallel.offload_weights", ["*"])
        elif key == "pseudo_huber_c":
            made.set("loss.type", "huber")
            made.set("loss.huber_c", value)
        elif key not in ("gradient_accumulation_steps", "epochs"):
            _plain(made, key, value)
    if "max_steps" not in config:
        made.set("training.epochs", config.get("epochs", 1))
    elif "epochs" in config:
        made.leave_out("epochs", config["epochs"], "max_steps ends the run")
    tables = {name: made.tables[name] for name in ("output", *TABLES) if name in made.tables}
    lines = [f"made of {path.name}, a configuration of diffusion-pipe"]
    if made.left_out:
        lines += ["", "without a counterpart here:", *(f"  {line}" for line in made.left_out)]
    return to_toml(tables, "\n".join(lines))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} is no TOML: {error}") from error


def _plain(made: _Conversion, key: str, value: Any) -> None:
    if key in _SAME:
        made.set(_SAME[key], value)
    else:
        made.leave_out(key, value, _WITHOUT.get(key, "unknown"))


def _batch(made: _Conversion, config: Mapping[str, Any]) -> None:
    """Global batch of one replica: more replicas take more microbatches of it each."""
    micro = config.get("micro_batch_size_per_gpu", 1)
    if not isinstance(micro, int):
        made.leave_out("micro_batch_size_per_gpu", micro, "one microbatch size for all samples")
        micro = min(size for _, size in micro)
    steps = config.get("gradient_accumulation_steps", 1)
    made.set("training.batch_size", micro * steps)
    if steps > 1 or config.get("pipeline_stages", 1) > 1:
        made.left_out.append(
            f"training.batch_size = {micro * steps} is that of one replica; there it grows with "
            "the number of GPUs, here it stays"
        )


def _is_lora(adapter: object) -> bool:
    return isinstance(adapter, dict) and adapter.get("type") == "lora"


def _model(made: _Conversion, model: Mapping[str, Any], is_adapted: bool) -> None:
    kind = model.get("type", "")
    for key, value in model.items():
        if key == "dtype":
            made.set("training.dtype", _DTYPES.get(value, value))
        elif key == "diffusers_path":
            made.set("model.weights", value)
            made.set("encoders.folder", value)
        elif key in ("flux_shift", "lumina_shift"):
            made.set("process.flow_shift", "dynamic" if value else 1.0)
        elif key == "min_snr_gamma":
            made.set("loss.weighting", "min-snr")
            made.set("loss.snr_gamma", value)
        elif key == "debiased_estimation_loss":
            made.set("loss.weighting", "debiased" if value else "none")
        elif key in ("transformer_dtype", "diffusion_model_dtype") and is_adapted and value in _FP8:
            made.set("quantization.type", "fp8")
        elif key in _FILES or key.endswith("_path"):
            made.leave_out(f"model.{key}", value, _FOLDER if Path(str(value)).is_dir() else _FILE)
        elif key != "type":
            _plain(made, f"model.{key}", value)
    if model.get("debiased_estimation_loss") and model.get("min_snr_gamma") is not None:
        del made.tables["loss"]["snr_gamma"]
        made.set("loss.weighting", "debiased")
        reason = "one weighting, debiased_estimation_loss; there both are multiplied"
        made.leave_out("model.min_snr_gamma", model["min_snr_gamma"], reason)
    if "diffusers_path" not in model:
        made.set("model.weights", f"diffusers folder of {kind}")
        made.left_out.append(f"model.weights: name the diffusers folder of {kind} yourself")
    if kind not in _FAMILIES:
        made.left_out.append(
            f"model.type = {kind!r}: traced from its diffusers class, if it can be"
        )


def _adapter(made: _Conversion, adapter: Mapping[str, Any]) -> None:
    """LoRA of all linear layers in blocks, with alpha equal to the rank."""
    if adapter.get("type") == "lora":
        made.set("adapter.type", "lora")
        made.set("adapter.targets", ["*blocks.*"])
    elif "type" in adapter:
        reason = _WITHOUT["adapter.type"] + ": the recipe trains all weights"
        for key, value in adapter.items():
            made.leave_out(f"adapter.{key}", value, reason)
        return
    for key, value in adapter.items():
        if key != "type" or value != "lora":
            _plain(made, f"adapter.{key}", value)


def _optimizer(made: _Conversion, optimizer: Mapping[str, Any]) -> None:
    kind = str(optimizer.get("type", "adamw"))
    made.set("optimizer.type", "sgd" if kind.lower() == "sgd" else "adam")
    if kind.lower() not in (*_ADAM, "sgd"):
        made.leave_out("optimizer.type", kind, "Adam is used in its place; choose its lr")
    elif kind.lower() not in ("adam", "adamw", "sgd"):
        made.leave_out(
            "optimizer.type", kind, "Adam with fp32 states and main weights, in its place"
        )
    if "lr" not in optimizer:
        made.set("optimizer.lr", 1e-5)
        made.left_out.append("optimizer.lr = 1e-05 is a guess: there was none")
    for key, value in optimizer.items():
        if key != "type":
            _plain(made, f"optimizer.{key}", value)


def _monitoring(made: _Conversion, monitoring: Mapping[str, Any]) -> None:
    enabled = monitoring.get("enable_wandb", False)
    for key, value in monitoring.items():
        if value and enabled and (key != "enable_wandb" or value is not True):
            _plain(made, f"monitoring.{key}", value)


def _dataset_file(config: Path, name: str) -> Path | None:
    """The dataset file, as named or beside the configuration; None if there is none."""
    places = [Path(name), config.parent / name, config.parent / Path(name).name]
    return next((each for each in places if each.is_file()), None)


def _validation(made: _Conversion, config: Path, given: Sequence[object]) -> None:
    """Directories of all dataset files for validation."""
    names = [str(one["config"] if isinstance(one, dict) else one) for one in given]
    files = {name: _dataset_file(config, name) for name in names}
    for name in (name for name, place in files.items() if place is None):
        made.left_out.append(f"eval_datasets {name!r}: there is no such file")
    folders = [
        f"captions:{each['path']}"
        for place in files.values()
        if place is not None
        for each in _read(place).get("directory", [])
    ]
    if folders:
        made.set("validation.source", ",".join(dict.fromkeys(folders)))


def _dataset(made: _Conversion, config: Path, name: str) -> None:
    """Directories of the dataset file, or its name where there is no such file."""
    place = _dataset_file(config, name)
    if place is None:
        made.set("data.source", "captions:FOLDER")
        made.left_out.append(f"dataset = {name!r}: there is no such file; name the folder yourself")
        return
    dataset = _read(place)
    directories = dataset.pop("directory", [])
    taken = {*_sources(made, dataset, directories), *_shapes(made, dataset)}
    for key, value in dataset.items():
        if key not in taken:
            made.leave_out(f"dataset.{key}", value, _WITHOUT.get(f"dataset.{key}", "unknown"))
    for each in directories:
        for key, value in each.items():
            if key in ("path", "num_repeats", "caption_prefix"):
                continue
            known = _WITHOUT.get(f"dataset.directory.{key}") or _WITHOUT.get(f"dataset.{key}")
            made.leave_out(f"dataset {each['path']}: {key}", value, known or "unknown")


def _sources(
    made: _Conversion, dataset: Mapping[str, Any], directories: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Set the folders with their repeats and captions; yield the keys that are taken over."""
    sources = []
    for each in directories:
        source = {"path": f"captions:{each['path']}"}
        if (repeats := each.get("num_repeats", dataset.get("num_repeats", 1))) != 1:
            source["repeats"] = repeats
        if prefix := each.get("caption_prefix", dataset.get("caption_prefix", "")):
            source["caption_prefix"] = str(prefix)
        sources.append(source)
    if all(source.keys() == {"path"} for source in sources):
        made.set("data.source", ",".join(source["path"] for source in sources))
    else:
        made.set("data.sources", sources)
    yield from ("num_repeats", "caption_prefix")
    if dataset.get("shuffle_tags"):
        made.set("data.shuffle_tags", True)
        yield "shuffle_tags"


def _shapes(made: _Conversion, dataset: Mapping[str, Any]) -> Iterator[str]:
    """Set the resolution and the buckets; yield the keys that are taken over."""
    resolutions, side = dataset.get("resolutions"), None
    if (
        isinstance(resolutions, list)
        and resolutions
        and all(isinstance(one, int) for one in resolutions)
    ):
        side = max(resolutions)
        if len(resolutions) == 1:
            yield "resolutions"
    ratios = dataset.get("ar_buckets", dataset.get("size_buckets"))
    if isinstance(ratios, list) and ratios and (side or isinstance(ratios[0], list)):
        made.set("data.buckets", [_shape(one, side) for one in ratios])
        yield from ("ar_buckets", "size_buckets", "enable_ar_bucket")
        return
    if side:
        made.set("data.resolution", side)
    if dataset.get("enable_ar_bucket") and side:
        made.set("data.buckets", "auto")
        yield "enable_ar_bucket"
        yield from (k for k, ratio in (("min_ar", 0.5), ("max_ar", 2)) if dataset.get(k) == ratio)
        if isinstance(count := dataset.get("num_ar_buckets"), int):
            made.set("data.max_buckets", count)
            yield "num_ar_buckets"


def _shape(given: float | Sequence[int], side: int | None) -> list[int]:
    """Width and height of a bucket given by them, or by its aspect ratio beside a resolution."""
    if isinstance(given, list):
        return [int(given[0]), int(given[1])]
    assert side is not None and isinstance(given, int | float)
    width, height = side * math.sqrt(given), side / math.sqrt(given)
    return [max(round(size / _STEP), 1) * _STEP for size in (width, height)]
