"""``pulse unpack``: an original single file as a diffusers folder."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_pulse.cli.flag_checks import (
    add_flag,
    add_parser,
    as_user_error,
    check_folder,
    command_faults,
    require,
)
from megatron_pulse.cli.import_megatron import prepare_megatron
from megatron_pulse.errors import UserError, collecting, format_faults

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_pulse.diffusion.float8 import Float8Tensors

_DESCRIPTION = """\
Writes the components of an original single file (.safetensors, or .ckpt, .pth with weights only)
as a diffusers folder, for model.weights and encoders.folder of a recipe: backbone (UNet, SD3, Flux,
Wan), autoencoder and text encoders, each with the values of the file.
--config is a folder of the same model with all its config.json files, tokenizers and scheduler; of
what the file lacks, that folder must hold the weights. With the folder of one component, that
component alone is written. float8 becomes fp32.

examples:
  pulse unpack v1-5-pruned.safetensors --config sd15-configs --to sd15
  pulse unpack ae.safetensors --config flux-configs/vae --to vae
  pulse unpack wan2.1_t2v_1.3B_bf16.safetensors --config Wan2.1-Diffusers --to wan
"""

_OPTIONAL = ("safety_checker", "feature_extractor", "image_encoder")
"""Components without which pipelines work."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``unpack``."""
    parser = add_parser(
        commands, "unpack", "write a single file as a diffusers folder", _DESCRIPTION, run
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the original file")
    add_flag(parser, "--config DIR", "folder of configurations", type=Path, required=True)
    add_flag(parser, "--to DIR", "the folder to write, new or empty", type=Path, required=True)


def run(args: argparse.Namespace) -> None:
    """Read, convert, write."""
    faults = [*command_faults(args), *check_folder(args.to.parent, "--to")]
    if not args.file.is_file():
        faults.append(f"{args.file}: there is no such file")
    names = ("model_index.json", "config.json")
    if not any((args.config / name).is_file() for name in names):
        faults.append(f"--config {args.config} holds no {' or '.join(names)}")
    if args.to.exists() and not (args.to.is_dir() and not any(args.to.iterdir())):
        faults.append(f"--to {args.to} exists: name a new one")
    require(faults)
    prepare_megatron()
    from megatron_pulse.diffusion.float8 import Float8Tensors
    from megatron_pulse.diffusion.published import read_state_dict

    with as_user_error(ValueError):
        stored = Float8Tensors(read_state_dict(args.file))
        for line in _unpack(stored, args.config, args.to):
            print(line)


def _unpack(stored: Float8Tensors, base: Path, target: Path) -> list[str]:
    """Write all components; returns a line on each."""
    from megatron_pulse.diffusion.published import read_config, write_json
    from megatron_pulse.diffusion.scheduler_import import PIPELINE_INDEX
    from megatron_pulse.encoders.pipeline_export import take_over
    from megatron_pulse.file_kinds import FileKind
    from megatron_pulse.files import read_json, replacing_folder

    if not (base / PIPELINE_INDEX).is_file():
        class_name = read_config(base)["_class_name"]
        with replacing_folder(target) as beside:
            if not _write(stored, base, "", "diffusers", class_name, beside):
                raise UserError(f"the file holds no {class_name}, which --config {base} is of")
        return [f"{target}: {class_name}"]
    index = read_json(base / PIPELINE_INDEX, FileKind.PIPELINE)
    told, faults = [], list[str]()
    with replacing_folder(target) as beside:
        for name, said in index.items():
            if not isinstance(said, list) or None in said:
                continue
            library, class_name = map(str, said)
            with collecting(faults, (ValueError, OSError)):
                if _write(stored, base, name, library, class_name, beside):
                    told.append(f"{name}: {class_name}, of the file")
                elif _is_whole(base / name):
                    take_over(base / name, beside / name)
                    told.append(f"{name}: {class_name}, of {base}")
                elif name in _OPTIONAL:
                    index = {**index, name: [None, None]}
                    told.append(f"{name}: left out")
                else:
                    faults.append(
                        f"{name} ({class_name}) is neither in the file nor with weights in {base}"
                    )
        if faults:
            raise UserError(format_faults("the pipeline", faults))
        write_json(beside / PIPELINE_INDEX, index)
    return [f"{target}: {index['_class_name']}", *told]


def _is_whole(folder: Path) -> bool:
    """True for a component's folder that needs no weights, or has them."""
    from megatron_pulse.diffusion.published import holds_weights

    if not folder.is_dir():
        return False
    is_model = (folder / "config.json").is_file()
    return not is_model or holds_weights(folder) or any(folder.glob("model*.safetensors"))


def _write(
    stored: Float8Tensors, base: Path, name: str, library: str, class_name: str, target: Path
) -> bool:
    """Write one component of the file, if it is there."""
    from megatron_pulse.diffusion.published import write_component
    from megatron_pulse.diffusion.single_file import SUPPORTED, OriginalLayout
    from megatron_pulse.diffusion.single_file_refusal import READ, find_original
    from megatron_pulse.encoders.single_file_parts import autoencoder_or_text_encoder
    from model_specs import load_published, published_form, read_published

    if class_name in SUPPORTED:
        original = find_original(stored)
        if original is None or READ.get(original[1]) != class_name:
            return False
        published = published_form(load_published(read_published(base / name)))
        assert published is not None  # of a config.json
        tensors: Mapping[str, Tensor] = OriginalLayout(published).read(stored, "the file")
        write_component(target / name, published, tensors)
        return True
    module: Any = autoencoder_or_text_encoder(stored, base, name, library, class_name)
    if module is None:
        return False
    module.save_pretrained(target / name)
    return True
