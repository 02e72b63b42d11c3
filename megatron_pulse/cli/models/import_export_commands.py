"""``pulse import`` and ``pulse export``: weights from and to published formats."""

from __future__ import annotations

import argparse
import shlex
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pulse.adapters.adapter import FORMATS
from megatron_pulse.cli.backbone_flags import (
    add_backbone_flags,
    add_option_flag,
    backbone_faults,
    option_faults,
    options_of,
)
from megatron_pulse.cli.flag_checks import (
    add_flag,
    add_parser,
    as_user_error,
    check_folder,
    command_faults,
    require,
)
from megatron_pulse.cli.import_megatron import prepare_megatron
from megatron_pulse.cli.shared_flags import DTYPES, add_checkpoint_flags
from megatron_pulse.dataclass_flags import add_flags, read_flags
from megatron_pulse.diffusion.process_flags import ProcessChoice
from megatron_pulse.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_pulse.backbone.chain import Backbone
    from megatron_pulse.backbone.published_weights import Published
    from megatron_pulse.encoders.pipeline_export import PipelineBase
    from megatron_pulse.integration.checkpoint.saved_run import SavedRun
    from megatron_pulse.integration.megatron.stage import MegatronStage

_IMPORT = """\
Reads a diffusers folder (a pipeline, or its unet or transformer) and writes a checkpoint for
--pretrained-checkpoint DIR, for any layout, with a new optimizer. The EMA starts at the same
weights. A single file (.pth, .ckpt, .safetensors) is the state dict of U-ViT or SUV (--backbone)
or of a module of your own (--module), or an original checkpoint of SD, SDXL, SD3, Flux or Wan, of
which the backbone is read (--backbone, --module diffusers:CLASS, or --config with the folder of a
config.json; 'pulse unpack' reads all components). A UNet with classes gets no null class unless
--null-class is given. Every tensor must be there with its shape; faults are listed, and nothing is
written.
With --controlnet the UNet is frozen. Training trains and exporting writes a ControlNet: that of a
diffusers folder, or a new one, which begins as the UNet's encoder.
hf:ID[@revision] in place of a folder is downloaded to huggingface_hub's cache.
The diffusion process is that of scheduler/scheduler_config.json. If it is missing or unknown, flags
must give it.

examples:
  pulse import --from stable-diffusion-v1-5 --to checkpoints/sd15
  pulse import --from PixArt-Sigma-XL-2-1024-MS/transformer --to checkpoints/pixart
  pulse import --from stable-diffusion-v1-5 --controlnet new --to checkpoints/control
  pulse import --from downloads/transformer --objective v --noise-schedule scaled_linear \\
      --beta-end 0.018 --to checkpoints/hunyuan
  pulse import --from v1-5-pruned.safetensors --backbone sd-v1.5 --objective epsilon \\
      --noise-schedule scaled_linear --to checkpoints/sd15
  pulse import --from sd3_medium.safetensors --config sd3-folder --to checkpoints/sd3
  pulse import --from mine.safetensors --module mine.py:build --objective v --to checkpoints/mine
  pulse import --from imagenet256_uvit_huge.pth --backbone uvit-h --objective epsilon \\
      --noise-schedule scaled_linear --to checkpoints/uvit
"""

_EXPORT = """\
Writes the EMA of a checkpoint's weights (with --raw: the weights) in the published format of the
model: a folder for diffusers' from_pretrained, or for U-ViT, SUV and a module of your own a file
(.pth or .safetensors) with its names. For UNets, SD3, Flux and Wan, --to FILE.safetensors writes
the backbone with the original names, as ComfyUI and from_single_file read them. Imported weights
are exported bit for bit. The diffusion process is written as a diffusers scheduler's configuration,
into the folder scheduler, or beside a file as NAME.scheduler_config.json.

Of an adapter's run it writes the adapter alone: a folder for load_lora_weights, or one file
(.safetensors). With --merge it writes the whole model, with the adapter's effect in its weights.
These are the published ones, not their quantisation.

With --pipeline the folder is a whole pipeline for DiffusionPipeline.from_pretrained: the other
components are those of the pipeline given, or else of the run's encoders or of the imported one.
Large files are hard links. README.md says how it was trained. --push uploads the folder to the
Hugging Face hub; a new repository there is private.

examples:
  pulse export --load checkpoints/sd15 --to exported/unet
  pulse export --load runs/a --iteration best --to exported/pipeline --pipeline
  pulse export --load runs/a --to exported --pipeline sd-v1.5 --push me/my-model
  pulse export --load runs/a --iteration 4000 --raw --dtype bfloat16 --to exported/transformer
  pulse export --load runs/uvit --to uvit.pth
  pulse export --load runs/lora/checkpoints --to exported/lora
  pulse export --load runs/lora/checkpoints --to exported/merged --merge --pipeline
"""


_FILES = (".pth", ".pt", ".safetensors")
"""Suffixes of a file that holds a whole model."""


_KNOWN = ""
"""Value of --pipeline that means a pipeline known to the run."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``import`` and ``export``."""
    parser = add_parser(
        commands, "import", "make a checkpoint of published weights", _IMPORT, run_import
    )
    add = partial(add_flag, parser)
    add("--from PATH|hf:ID", "folder or file to read", dest="source", type=Path, required=True)
    add("--to DIR", "new folder, for --pretrained-checkpoint", type=Path, required=True)
    what = parser.add_mutually_exclusive_group()
    add_backbone_flags(what, "for a single file: the backbone that it holds")
    add_option_flag(
        parser, "override one of the options of a --backbone, a --module or a traced class"
    )
    add(
        "--config DIR|hf:ID",
        "for an original single file: diffusers folder with its config.json; no weights are read",
        type=Path,
    )
    process = parser.add_argument_group(
        "diffusion process",
        "Settings that the pipeline's scheduler lacks, or that replace its own.",
    )
    add_flags(ProcessChoice, process, unsaid="default: the scheduler's")
    add(
        "--null-class",
        "add a null class of zeros to a UNet with classes, for classifier-free guidance",
    )
    add(
        "--controlnet DIR|hf:ID|new",
        "freeze the UNet and train a ControlNet: of a diffusers folder, or a new one",
    )

    parser = add_parser(
        commands,
        "export",
        "write a checkpoint's weights in their published format",
        _EXPORT,
        run_export,
    )
    add = partial(add_flag, parser)
    add_checkpoint_flags(parser)
    add("--to PATH", "new folder or file to write", type=Path, required=True)
    add(
        "--pipeline [DIR|hf:ID]",
        "write a whole pipeline, with the components of this one (default: of the run's)",
        nargs="?",
        const=_KNOWN,
    )
    add(
        "--adapter-format",
        "of an adapter's run: that of diffusers and ComfyUI (default), of peft (default of LoKr), "
        "or of kohya",
        choices=FORMATS,
    )
    add("--merge", "of an adapter's run: the whole model, with the adapter's effect in its weights")
    add("--push OWNER/NAME", "upload the folder to this repository of the Hugging Face hub")
    add("--dtype", "of the written weights (default float32)", choices=DTYPES, default="float32")


def run_import(args: argparse.Namespace) -> None:
    """Read, compare, write; say how to train."""
    flags = import_published(args)
    print(f"train it with --pretrained-checkpoint {args.to} {shlex.join(flags)}")


def import_published(args: argparse.Namespace) -> list[str]:
    """Make a checkpoint of published weights; returns the flags of their backbone."""
    require([*_check_new(args.to), *_check_source(args)])
    prepare_megatron()
    from megatron_pulse.diffusion.scheduler_import import read_process
    from megatron_pulse.integration.checkpoint.published_weights import import_weights
    from megatron_pulse.integration.training_data import described

    with as_user_error(ValueError):
        read = _open_file if args.source.is_file() else _open_folder
        backbone, tensors, place = read(args)
        backbone, length = _with_length_of_texts(backbone, args.config or args.source)
        process, remark = read_process(place, read_flags(ProcessChoice, args))
        base = _pipeline_of(place)
        import_weights(backbone, tensors, str(args.source), args.to, process, base)
    count = sum(tensor.numel() for tensor in tensors.values())
    print(
        f"{args.to}: {backbone.name}, {len(tensors)} tensors with {count:,} values\n"
        f"process: {described(process, backbone)}" + (f"\n{remark}" if remark else "")
    )
    return [*flags_of(backbone, place), *length]


def run_export(args: argparse.Namespace) -> None:
    """Load, convert, write."""
    faults = [*command_faults(args), *(_check_new(args.to) or _check_beside(args.to))]
    if args.merge and args.adapter_format is not None:
        faults.append("--merge writes a whole model; leave --adapter-format out")
    if args.to.suffix in _FILES:
        given = {"--pipeline": args.pipeline, "--push": args.push}
        faults += [
            f"{flag} is for a folder: --to {args.to} is a file"
            for flag, value in given.items()
            if value is not None
        ]
    if args.pipeline and not Path(args.pipeline).is_dir():
        faults.append(f"--pipeline {args.pipeline}: there is no such folder")
    if args.push is not None:
        from megatron_pulse.diffusion.hub import push_faults

        faults += push_faults(args.push)
    require(faults)
    prepare_megatron()
    import torch

    from megatron_pulse.backbone.published_weights import PublishedError
    from megatron_pulse.diffusion.published import write_folder, write_state_dict
    from megatron_pulse.diffusion.scheduler_export import scheduler_of_process
    from megatron_pulse.diffusion.scheduler_import import INVERTED
    from megatron_pulse.diffusion.single_file import OriginalLayout
    from megatron_pulse.encoders.pipeline_export import write_pipeline
    from megatron_pulse.integration.checkpoint.published_weights import export_weights, load_whole
    from megatron_pulse.integration.checkpoint.saved_run import read_saved_run
    from megatron_pulse.integration.model_card import Export, model_card
    from megatron_pulse.integration.training_data import makes_pixels

    with as_user_error(ValueError):
        saved = read_saved_run(args.load, args.iteration, args.frozen_weights)
        saved = saved.of_chain(args.chain)
        alone = "adapter" in saved.arguments.pulse_record and not args.merge
        backbone, stage = load_whole(
            saved, averaged=not args.raw, quantized=False, frozen=not alone
        )
        if alone:
            _export_adapter(args, saved, backbone, stage)
            return
        for flag, value in (("--merge", args.merge), ("--adapter-format", args.adapter_format)):
            if value and "adapter" not in backbone.record:
                raise UserError(f"{flag} is for an adapter, and {args.load} trains none")
        published, tensors = export_weights(backbone, stage)
    dtype = getattr(torch, args.dtype)
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    if beyond := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise PublishedError(f"weights that {args.dtype} cannot hold", beyond)
    inverted = published.class_name in INVERTED
    scheduler = scheduler_of_process(saved.process, makes_pixels(saved.arguments), inverted)
    if published.library == "diffusers" and args.to.suffix in (".pth", ".pt"):
        raise UserError(f"--to {args.to}: an original single file is a .safetensors")
    if published.library != "diffusers" and args.to.suffix not in _FILES:
        raise UserError(f"--to {args.to}: {backbone.name} is one file, {' or '.join(_FILES)}")
    base = None
    if args.pipeline is not None:
        base = _open_base(args.pipeline, saved, published)
    if published.library == "diffusers" and args.to.suffix in _FILES:
        tensors = OriginalLayout(published).write(tensors)
        write_state_dict(args.to, tensors, scheduler)
    elif published.library == "diffusers":
        known = next((one for one in saved.base_pipelines if one.is_dir()), None)
        exported = Export(saved, published, not args.raw, args.dtype, known)
        if base is None:
            write_folder(
                args.to, published, tensors, scheduler=scheduler, card=model_card(exported)
            )
        else:
            exported = replace(exported, base=base.folder, pipeline_class=base.class_name)
            write_pipeline(args.to, base, published, tensors, scheduler, model_card(exported))
    else:
        write_state_dict(args.to, tensors, scheduler)
    if backbone.takes_prediction:
        print(
            "diffusers loads it, but its pipelines do not feed predictions back: the channels "
            "behind the sample's are the x_0 estimated in the step before"
        )
    shapes = (backbone.input_spec.shape, *backbone.input_spec.others)
    spaced = published.config.get("sample_size")
    if spaced is not None and any({*shape[-2:]} != {spaced} for shape in shapes):
        sizes = ", ".join("x".join(map(str, shape[-2:])) for shape in shapes)
        print(
            f"trained at {sizes}; config.json has sample_size {spaced}, the spacing of any fixed "
            "positions, so ask pipelines for the size that you want"
        )
    count = sum(tensor.numel() for tensor in tensors.values())
    print(
        f"{args.to}: {published.class_name} of {published.library}, {len(tensors)} tensors with "
        f"{count:,} values, {args.dtype}, {'raw' if args.raw else 'averaged'} weights, "
        f"{scheduler['_class_name']}: {saved.process.describe()}"
    )
    if base is not None:
        others = ", ".join(base.others) or "no other component"
        print(f"{base.class_name}, with {others} of {base.folder}")
    _push(args)


def _push(args: argparse.Namespace) -> None:
    """Upload the exported folder, if ``--push`` names a repository."""
    if args.push is not None:
        from megatron_pulse.diffusion.hub import push

        with as_user_error(ValueError):
            print(f"pushed: {push(args.to, args.push)}")


def _export_adapter(
    args: argparse.Namespace, saved: SavedRun, backbone: Backbone, stage: MegatronStage
) -> None:
    """Write the adapter alone."""
    import torch

    from megatron_pulse.adapters.adapter import Adapter, describe
    from megatron_pulse.adapters.files import count_layers, write_adapter
    from megatron_pulse.integration.checkpoint.published_weights import adapter_factors
    from megatron_pulse.integration.model_card import Export, model_card
    from model_specs import published_form

    if args.pipeline is not None:
        raise UserError("--pipeline is for a whole model: add --merge, or leave it out")
    published = published_form(backbone)
    assert published is not None  # its targets are names in it
    dtype = getattr(torch, args.dtype)
    factors = {n: tensor.to(dtype) for n, tensor in adapter_factors(backbone, stage).items()}
    record = backbone.record["adapter"]
    by_diffusers = published.library == "diffusers" and record["type"] != "lokr"
    kind = args.adapter_format or ("diffusers" if by_diffusers else "peft")
    exported = Export(saved, published, not args.raw, args.dtype, adapter_format=kind)
    adapter = Adapter.from_record(record)
    write_adapter(args.to, kind, adapter, factors, published.class_name, model_card(exported))
    count = sum(tensor.numel() for tensor in factors.values())
    print(
        f"{args.to}: {describe(record)}, {count_layers(factors)} layers with {count:,} values, "
        f"{args.dtype}, {'raw' if args.raw else 'averaged'} weights, in the format of {kind}"
    )
    if kind == "diffusers":
        is_second = published.class_name.startswith("Wan") and saved.process.max_time < 1
        call = f"load_lora_weights('{args.to}'{', load_into_transformer_2=True' * is_second})"
        print(f"load it with {call} of a diffusers pipeline, or in ComfyUI")
    _push(args)


def _open_base(given: str, saved: SavedRun, published: Published) -> PipelineBase:
    """Base pipeline that was given, or the first that the run knows and that fits."""
    from megatron_pulse.backbone.published_weights import PublishedError
    from megatron_pulse.encoders.pipeline_export import open_base

    if published.part:
        raise UserError(
            f"--pipeline: a {published.class_name} is an addition to a pipeline, not its backbone. "
            "Leave it out, and give the exported folder to the pipeline's class in diffusers"
        )
    if given != _KNOWN:
        return open_base(Path(given), published.class_name)
    reasons = []
    for folder in saved.base_pipelines:
        try:
            return open_base(folder, published.class_name)
        except PublishedError as error:
            reasons.append(str(error))
    told = "; ".join(reasons) or "the run has no --pulse-encoders, nor weights of a pipeline"
    raise UserError(f"--pipeline: no base pipeline is known: {told}. Give --pipeline DIR")


def _pipeline_of(component: Path) -> Path | None:
    """Pipeline folder that holds a component; None for a component alone."""
    from megatron_pulse.diffusion.scheduler_import import PIPELINE_INDEX

    folder = component.absolute().parent
    return folder if (folder / PIPELINE_INDEX).is_file() else None


def _open_folder(args: argparse.Namespace) -> tuple[Backbone, Mapping[str, Tensor], Path]:
    from megatron_pulse.diffusion.published import find_component, read_folder
    from model_specs import load_published, read_published

    component = find_component(args.source)
    backbone: Backbone = load_published(read_published(component), options_of(args))
    tensors: Mapping[str, Tensor] = read_folder(component)
    if args.controlnet is not None:
        from model_specs.controlnet.attach import with_controlnet

        backbone, tensors = with_controlnet(component, tensors, args.controlnet)
    elif args.null_class:
        backbone, tensors = _with_null_class(backbone, tensors)
    return backbone, tensors, component


def _with_null_class(
    backbone: Backbone, tensors: Mapping[str, Tensor]
) -> tuple[Backbone, Mapping[str, Tensor]]:
    """Class-conditional UNet with an additional row of zeros in its table of classes."""
    import torch

    from model_specs import is_module, load_backbone

    table, record = "class_embedding.weight", backbone.record
    if is_module(backbone.name):
        raise UserError(
            f"--null-class: {backbone.name} has the classes of its config.json; train it with "
            "--pulse-class-dropout 0"
        )
    if table not in tensors or backbone.null_label is not None:
        raise UserError(f"--null-class: {backbone.name} has no classes, or a null class already")
    rows = tensors[table]
    grown = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
    grown_options = {**record["options"], "null_class": True}
    backbone = replace(load_backbone(record["name"], grown_options), kept=backbone.kept)
    return backbone, ChainMap({table: grown}, tensors)  # type: ignore[arg-type]


def _open_file(args: argparse.Namespace) -> tuple[Backbone, Mapping[str, Tensor], Path]:
    from megatron_pulse.diffusion.float8 import Float8Tensors
    from megatron_pulse.diffusion.published import find_component, read_state_dict
    from megatron_pulse.diffusion.single_file import OriginalLayout
    from megatron_pulse.diffusion.single_file_refusal import READ, find_original
    from model_specs import load_backbone, load_published, published_form, read_published

    stored, place = Float8Tensors(read_state_dict(args.source)), args.source
    if args.config is not None:
        place = find_component(args.config)
        backbone: Backbone = load_published(read_published(place))
    else:
        backbone = load_backbone(args.backbone, options_of(args))
    published = published_form(backbone)
    original = find_original(stored)
    if published is None or published.library != "diffusers" or original is None:
        return backbone, stored, place
    if (kind := READ[original[1]]) != published.class_name:
        raise UserError(
            f"--from {args.source} holds a {kind} ({original[0]}), and {backbone.name} is a "
            f"{published.class_name}: name its own --backbone or --config"
        )
    return backbone, OriginalLayout(published).read(stored, str(args.source)), place


def _check_new(path: Path) -> list[str]:
    if not path.name:
        return [f"--to {path}: name a new file or folder"]
    if path.is_dir() and any(path.iterdir()):
        return [f"--to {path} is not empty: name a new one"]
    if path.is_file():
        return [f"--to {path} exists: name a new one"]
    return check_folder(path.parent, "--to")


def _check_beside(path: Path) -> list[str]:
    """Fault if the scheduler file beside an exported file exists, perhaps from another export."""
    from megatron_pulse.diffusion.scheduler_import import file_beside

    beside = file_beside(path)
    return [f"--to {path}: {beside} exists: name a new one"] if beside.exists() else []


def _check_source(args: argparse.Namespace) -> list[str]:
    faults = option_faults(args)
    if args.source.is_file():
        if faults_of_file := _original(args):
            return faults_of_file
        if args.config is not None:
            if not args.config.is_dir():
                faults.append(f"--config {args.config}: there is no such folder")
            if args.backbone is not None or args.option:
                faults.append(
                    "--config names the model: leave --backbone, --module and --option out"
                )
        elif args.backbone is None:
            faults.append(f"--from {args.source} is a file: name its --backbone or --module")
        elif not faults:
            faults += backbone_faults(args)
        for flag in ("null_class", "controlnet"):
            if getattr(args, flag):
                faults.append(f"--{flag.replace('_', '-')} is for a diffusers folder")
    elif not args.source.is_dir():
        faults.append(f"--from {args.source}: there is no such file or folder")
    elif args.backbone is not None or args.config is not None:
        faults.append(
            "--backbone, --module and --config are for single files; a folder's config.json names "
            "its model"
        )
    if args.controlnet is not None:
        from model_specs.controlnet.attach import NEW

        if args.null_class:
            faults.append("--null-class: a ControlNet has the classes of its UNet; leave it out")
        if args.controlnet != NEW and not Path(args.controlnet).is_dir():
            faults.append(
                f"--controlnet {args.controlnet}: there is no such folder; {NEW} makes one"
            )
    return faults


def _original(args: argparse.Namespace) -> list[str]:
    """Faults of an original single file that is not read; a user's code is exempt."""
    from megatron_pulse.diffusion.published import names_in
    from megatron_pulse.diffusion.single_file_refusal import READ, find_original, original_faults
    from model_specs import is_code

    if args.backbone is not None and is_code(args.backbone):
        return []
    names = names_in(args.source)
    original = find_original(names)
    if original is None or original[1] not in READ:
        return [f"--from {fault}" for fault in original_faults(args.source, names)]
    if args.backbone is None and args.config is None:
        return [
            f"--from {args.source.name} is an original single-file checkpoint ({original[0]}). "
            "Name its model: --backbone (sd-v1.5, sdxl, sd3-medium, ...), or --config with a "
            "diffusers folder"
        ]
    return []


def _with_length_of_texts(backbone: Backbone, folder: Path) -> tuple[Backbone, list[str]]:
    """Backbone for texts as long as the pipeline's tokenizers make them, and flags for training.

    A module is returned unchanged, with the flag that sets the length.
    """
    from megatron_pulse.encoders.tokens import Tokenizers
    from model_specs import changed_options, compare_models, is_module, load_backbone, text_recipe

    try:
        recipe = text_recipe(backbone.name, backbone)
        if recipe is None:
            return backbone, []
        shapes = {field: backbone.batch_fields[field].shape for field in recipe.fields}
        lengths = Tokenizers(folder, recipe, shapes).state_lengths
    except ValueError:
        return backbone, []  # no tokenizers, or none for these fields
    for field, rows in recipe.fields.items():
        made = sum(max(lengths[part.place] for part in row) for row in rows)
        if len(shapes[field]) != 2 or made == shapes[field][0]:
            continue
        if is_module(backbone.name):
            return backbone, ["--pulse-option", f"{recipe.length_option}={made}"]
        options = {**changed_options(backbone), recipe.length_option: str(made)}
        try:
            fitted = load_backbone(backbone.record["name"], options)
        except ValueError:
            return backbone, []  # no such option
        if not compare_models(backbone.record, fitted.record).different:
            return fitted, []
    return backbone, []


def flags_of(backbone: Backbone, place: Path | None) -> list[str]:
    """Training flags for the model read at ``place``; None for one of a checkpoint."""
    from model_specs import changed_options, is_module

    if is_module(backbone.name) and place is not None and place.is_dir():
        return ["--pulse-module", f"diffusers:{place}"]
    words = ["--pulse-module" if is_module(backbone.name) else "--pulse-backbone", backbone.name]
    for key, text in changed_options(backbone).items():
        words += ["--pulse-option", f"{key}={text}"]
    return words
