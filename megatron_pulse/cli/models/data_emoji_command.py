"""``pulse data emoji``: a captioned data set of real pictures, without any download."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from megatron_pulse.cli.flag_checks import (
    add_flag,
    add_parser,
    as_user_error,
    check_folder,
    command_faults,
    require,
)
from megatron_pulse.dataclass_flags import FROM_ONE, PIXELS

_DESCRIPTION = """\
Renders every emoji of a colour font as a PNG file over white. Its Unicode name ("grinning face") is
its caption in metadata.jsonl. The folder appears whole or not at all. Train on it with
--pulse-data captions:FOLDER.

The default font is Debian's and Ubuntu's: apt-get install fonts-noto-color-emoji

examples:
  pulse data emoji --to runs/emoji/images
  pulse data emoji --to faces --size 64 --limit 500 --font ~/fonts/NotoColorEmoji.ttf
"""


def add_emoji(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``emoji``."""
    parser = add_parser(
        commands, "data emoji", "render a font's emoji with captions", _DESCRIPTION, run
    )
    add = partial(add_flag, parser)
    add("--to FOLDER", "a new or empty folder", type=Path, required=True)
    add("--size N", "pixels of a side (default 32)", within=PIXELS, default=32)
    add("--limit N", "only the first N by code point", within=FROM_ONE, type=int)
    add("--font FILE", "another font with bitmaps of 109 pixels", type=Path)


def run(args: argparse.Namespace) -> None:
    """Render the emoji."""
    require(command_faults(args) + check_folder(args.to.parent, "--to"))
    from megatron_pulse.data.images.emoji import FONT, render_emoji

    with as_user_error(OSError):
        count = render_emoji(
            args.to, args.size, args.font or FONT, args.limit, progress=sys.stderr.isatty()
        )
    print(f"{count} emoji of {args.size}x{args.size}: {args.to}")
    print(f"train on them with --pulse-data captions:{args.to}")
