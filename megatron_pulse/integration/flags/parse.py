"""Parser of the command line: Megatron's flags, the ``--pulse-*`` flags, and the flags given."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments

from megatron_pulse.data.opened_images import OpenedImages
from megatron_pulse.dataclass_flags import NearestChoiceParser, with_new_names
from megatron_pulse.diffusion.hub import with_local_folders
from megatron_pulse.integration.flags.fsdp_flags import take_megatron_flags
from megatron_pulse.integration.flags.megatron_flags import Support, load_table
from megatron_pulse.integration.flags.optimizers import unsupported_optimizer
from megatron_pulse.integration.flags.pulse_options import add_pulse_arguments


@dataclass(frozen=True)
class CommandLine:
    """Every flag's value, and the flags given on the command line.

    ``given`` holds first names (never an alias), in the order given. ``unread`` are flags with
    unreadable values, which have their defaults.
    """

    args: argparse.Namespace
    given: tuple[str, ...]
    faults: tuple[str, ...]
    """Faults of unknown flags, of values, and of Megatron's flags that cannot be used."""
    unread: tuple[str, ...] = ()
    opened: dict[str, Any] = field(default_factory=dict)
    """The run's data, once they are opened, with what they were opened for (see ``open_data``)."""
    images: OpenedImages = field(default_factory=OpenedImages)
    """Datasets of pictures that this start has opened."""

    def says(self, flag: str) -> bool:
        """True if ``flag`` was given with a readable value."""
        return flag in self.given and flag not in self.unread


OPTIMIZER = "--optimizer"


class Parser(NearestChoiceParser):
    """Megatron's parser with the ``--pulse-*`` flags, whose help lists the supported flags only."""

    def __init__(self) -> None:
        super().__init__(
            usage="pulse run ... launch/pretrain_diffusion.py --pulse-backbone NAME [flags]",
            description=("Train a diffusion backbone. Unlisted flags of Megatron are unsupported."),
            allow_abbrev=False,
        )
        with _without_their_texts():
            add_megatron_arguments(self)
        for group in self._action_groups:  # a title says as much; one without flags is left out
            group.description = None
        add_pulse_arguments(self)
        table = load_table()
        hidden = 0
        for action in self._actions:
            flag = table.get(action.option_strings[0])
            if _is_ours(action):
                continue
            if action.dest == "ckpt_step":
                action.type = _step
            if flag is not None and flag.standing is Support.WORKS:
                action.help = flag.note.replace("%", "%%")
            else:
                action.help = argparse.SUPPRESS
                hidden += 1
        self.epilog = (
            f"'pulse flags' explains why the other {hidden} flags of Megatron are unsupported."
        )

        self.faults: dict[str, str] = {}
        """Faults of unreadable values, by flag."""

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            self._note(action, error)
            return 0

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if _name(action) in self.faults:
            return action.default
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            self._note(action, error)
            if _name(action) == OPTIMIZER and (why := unsupported_optimizer(arg_strings[0])):
                self.faults[OPTIMIZER] = f"{OPTIMIZER} {arg_strings[0]}: {why}"
            return action.default

    def _note(self, action: argparse.Action, error: argparse.ArgumentError) -> None:
        self.faults[_name(action)] = f"{'/'.join(action.option_strings)}: {error.message}"

    def error(self, message: str) -> NoReturn:
        """End with status 2 and one line, without the list of all flags."""
        print(f"error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(2)


@contextmanager
def _without_their_texts() -> Iterator[None]:
    """Skip Megatron's slow parsing of its dataclasses' help texts, which are replaced here."""
    original = ArgumentGroupFactory._get_field_docstrings
    ArgumentGroupFactory._get_field_docstrings = lambda self, of: {}
    try:
        yield
    finally:
        ArgumentGroupFactory._get_field_docstrings = original


def parse(argv: Sequence[str] | None = None, num_ranks: int | None = None) -> CommandLine:
    """Parse ``argv`` (default: the process's) for ``num_ranks`` (default: the environment's).

    Unknown flags and invalid values are among the faults.
    """
    words, renamed = with_new_names(list(sys.argv[1:] if argv is None else argv))
    if renamed and os.environ.get("RANK", "0") == "0":
        print(*(f"warning: {line}" for line in renamed), sep="\n", file=sys.stderr)
    words, faults = with_local_folders(words)
    parser = Parser()
    faults += unknown_flags(parser, words)
    words, valued = _without_values(parser, words)
    args, rest = parser.parse_known_args(_without_unknown(parser, words))
    faults += valued
    faults += [f"{word!r} belongs to no flag" for word in rest]
    faults += parser.faults.values()
    take_megatron_flags(args)
    # Megatron's own parse_args adds these attributes.
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    args.rank = int(os.environ.get("RANK", "0"))
    args.world_size = num_ranks or int(os.environ.get("WORLD_SIZE", "1"))
    typed = _typed(parser, words)
    given = tuple(dict.fromkeys(action.option_strings[0] for action in typed.values()))
    faults += _refuse(parser, args, {n: a for n, a in typed.items() if not _is_ours(a)})
    return CommandLine(args, given, tuple(faults), tuple(parser.faults))


def _step(text: str) -> int | str:
    """Step of a checkpoint: a number, or ``best``."""
    return text if text == "best" else int(text)


def unknown_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Fault for each unknown flag, with a similar flag as a hint."""
    known = parser._option_string_actions
    faults = []
    for name in dict.fromkeys(word.split("=", 1)[0] for word in words if word.startswith("--")):
        if name == "--" or name in known or " " in name:
            continue
        near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
        meant = f"did you mean {near[0]}?" if near else "--help lists the supported flags"
        faults.append(f"there is no flag {name}: {meant}")
    return faults


def _without_unknown(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """``words`` without unknown flags and their values."""
    known = parser._option_string_actions
    kept, passing = [], False
    for word in words:
        if word.startswith("--") and word != "--" and " " not in word:
            passing = word.split("=", 1)[0] not in known
        if not passing:
            kept.append(word)
    return kept


def _without_values(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[list[str], list[str]]:
    """``words`` without values of flags that take none, and a fault for each."""
    kept, faults = [], []
    for word in words:
        name, equals, _ = word.partition("=")
        action = parser._option_string_actions.get(name)
        if action is not None and action.nargs == 0 and equals:
            faults.append(f"{word} is invalid: {name} takes no value")
            word = name
        kept.append(word)
    return kept, faults


def _name(action: argparse.Action) -> str:
    return action.option_strings[0]


def _typed(parser: argparse.ArgumentParser, words: Sequence[str]) -> dict[str, argparse.Action]:
    """Flags among ``words`` as they were written, in that order.

    Abbreviations are off, and argparse takes no word for a value that begins like a flag. Every
    known name is therefore a flag that was given.
    """
    actions = parser._option_string_actions
    names = dict.fromkeys(word.split("=", 1)[0] for word in words if word.startswith("--"))
    return {name: actions[name] for name in names if name in actions}


def _is_ours(action: argparse.Action) -> bool:
    return action.option_strings[0].startswith("--pulse-") or action.dest == "help"


def _refuse(
    parser: argparse.ArgumentParser, args: argparse.Namespace, typed: dict[str, argparse.Action]
) -> list[str]:
    table = load_table()
    faults = []
    for name, action in typed.items():
        flag = table.get(action.option_strings[0])
        value = getattr(args, action.dest)
        if flag is None:
            faults.append(
                f"{name} cannot be used: it is newer than the Megatron tested with this package. "
                "Leave it out"
            )
        elif flag.standing is Support.MEANINGLESS:
            faults.append(f"{name} has no effect here: {flag.note}. Leave it out")
        elif flag.standing is Support.REFUSED and value != parser.get_default(action.dest):
            faults.append(f"{name}{_shown(action, value)} cannot be used: {flag.note}")
        elif name == OPTIMIZER and (why := unsupported_optimizer(value)):
            faults.append(f"{OPTIMIZER} {value}: {why}")
        elif flag.values and str(value) not in flag.values:
            faults.append(
                f"{name}{_shown(action, value)} cannot be used, only {' or '.join(flag.values)}: "
                f"{flag.note}"
            )
    return faults


def _shown(action: argparse.Action, value: Any) -> str:
    """Value of a flag that takes one, as text."""
    if action.nargs == 0:
        return ""
    words = value if isinstance(value, list | tuple) else [value]
    return "".join(f" {word}" for word in words)
