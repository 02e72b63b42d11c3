"""``pulse data encoders``: components of a pipeline folder, and their use by a backbone."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pulse.cli.backbone_flags import (
    add_backbone_flags,
    add_option_flag,
    backbone_faults,
    options_of,
)
from megatron_pulse.cli.flag_checks import add_flag, add_parser, as_user_error, require
from megatron_pulse.cli.output import add_json, print_result, table
from megatron_pulse.encoders.text_recipe import VAE, TextRecipe, folder_name

if TYPE_CHECKING:
    from megatron_pulse.backbone.chain import Backbone

_DESCRIPTION = """\
Lists the components of a diffusers pipeline folder without reading weights, and what a backbone
reads of each: the text states of its fields, and the scaling of the autoencoder's latents. The
backbone is the folder's own, or a named one, which is then checked against the encoders. 'pulse
data write-latents --encoders DIR' and training with --pulse-encoders DIR use such a folder.

examples:
  pulse data encoders sd-v1.5
  pulse data encoders sdxl --backbone sdxl --json
"""
_TITLES = ("component", "class", "parameters", "GB", "types", "read as")


def add_encoders(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``encoders``."""
    parser = add_parser(
        commands, "data encoders", "list the encoders of a pipeline folder", _DESCRIPTION, run
    )
    add_flag(parser, "folder DIR", "a diffusers pipeline folder", type=Path)
    add_backbone_flags(
        parser.add_mutually_exclusive_group(),
        "backbone that reads the results (default: the folder's own)",
    )
    add_option_flag(parser, "override one of its options")
    add_json(parser, to_file=False)


def run(args: argparse.Namespace) -> None:
    """Print the table."""
    faults = backbone_faults(args) if args.backbone is not None else []
    if args.backbone is None and args.option:
        faults.append("--option is for --backbone or --module")
    require(faults)
    from megatron_pulse.encoders.components import components

    parts = components(args.folder)
    backbone, recipe, note = _reader(args)
    read = _read(args, backbone, recipe)
    cells = [
        (
            part.name,
            part.class_name,
            f"{part.num_parameters / 1e6:.1f} M" if part.num_parameters else "",
            f"{part.num_bytes / 1e9:.2f}" if part.num_bytes else "",
            part.dtype,
            part.fault.partition("\n")[0] or read.get(part.name, ""),
        )
        for part in parts
    ]
    lines = [*table([_TITLES, *cells], left=(0, 1, 4, 5)), note]
    print_result(
        args,
        lines,
        lambda: {
            "folder": str(args.folder),
            "backbone": None if backbone is None else backbone.name,
            "components": [asdict(part) | {"read_as": read.get(part.name)} for part in parts],
        },
    )
    if args.backbone is not None:
        of = [part for part in parts if part.fault and part.name in {*read, VAE}]
        require([f"{args.folder}: {part.name}: {part.fault}" for part in of])


def _reader(args: argparse.Namespace) -> tuple[Backbone | None, TextRecipe | None, str]:
    """Backbone, recipe of its text, and a note on its origin."""
    from megatron_pulse.diffusion.published import find_component
    from model_specs import load_backbone, load_published, read_published, text_recipe

    if args.backbone is not None:
        with as_user_error(ValueError):
            backbone = load_backbone(args.backbone, options_of(args))
            return backbone, text_recipe(args.backbone, backbone), f"read by {args.backbone}"
    try:
        config = read_published(find_component(args.folder))
        backbone = load_published(config)
        recipe = text_recipe(backbone.name, backbone)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        return None, None, f"the backbone that reads them is not known: {reason}; name a --backbone"
    return backbone, recipe, f"read by the folder's own {config['_class_name']}"


def _read(
    args: argparse.Namespace, backbone: Backbone | None, recipe: TextRecipe | None
) -> dict[str, str]:
    """Descriptions of the components' results as the backbone reads them."""
    from megatron_pulse.encoders.autoencoder import Autoencoder
    from megatron_pulse.encoders.text_encoders import TextEncoders

    read = {}
    if recipe is not None:
        for place in recipe.kinds:
            states = {name: recipe.of(name, place) for name in recipe.fields}
            said = [f"{name}: {of}" for name, of in states.items() if of]
            read[folder_name("text_encoder", place)] = "; ".join(said)
    if recipe is not None and backbone is not None and args.backbone is not None:
        shapes = {name: backbone.batch_fields[name].shape for name in recipe.fields}
        encoders = TextEncoders(args.folder, recipe, shapes, places=())
        for place, length in encoders.tokenizers.lengths.items():
            read[folder_name("tokenizer", place)] = f"{length} tokens"
    if (args.folder / VAE).is_dir():
        vae = Autoencoder(args.folder / VAE, weighs=False)
        made = f"latents of {vae.latent_channels} channels, {vae.factor} times smaller"
        read[VAE] = f"{made}, {vae.normalization()}"
        takes = vae.latent_channels if backbone is None else backbone.sample_spec.shape[0]
        if takes != vae.latent_channels and args.backbone is not None:
            made = f"{args.folder}/vae makes {vae.latent_channels}"
            require([f"{args.backbone} takes {takes} channels, and {made}"])
    return read
