"""Names of a recipe's keys in place of flags, in what its user reads. Imports nothing slow."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, TextIO, cast

from megatron_pulse.dataclass_flags import RECIPE_KEYS
from megatron_pulse.integration.flags.megatron_flags import load_table

_FLAG = re.compile(
    r"'pulse [^']*'|\bpulse [a-z-]+ --[^\n;,)]*|^command: .*"  # flags in commands stay
    r"|(?<![\w/.-])(?P<flag>--[a-z0-9][\w-]*)(?P<option>[ =](?=\w+=))?",
    re.MULTILINE,
)

_TWICE = re.compile(r"\b([\w.]+\.\w+) and \1\b")
"""Two flags with one key."""


def with_keys(text: str, keys: Mapping[str, str]) -> str:
    """``text`` with each flag replaced by its key, or by that of the table ``megatron``."""

    def name(found: re.Match[str]) -> str:
        flag, option = found["flag"], found["option"] or ""
        if flag in keys:
            return keys[flag] + ("." if option and keys[flag] == "model.options" else option)
        return f"megatron.{flag[2:]}{option}" if flag in load_table() else found[0]

    return _TWICE.sub(r"\1", _FLAG.sub(name, text)) if "--" in text else text


class _WithKeys:
    """Stream whose text names keys in place of flags."""

    def __init__(self, stream: TextIO, keys: Mapping[str, str]) -> None:
        self._stream, self._keys = stream, keys

    def write(self, text: str) -> int:
        self._stream.write(with_keys(text, self._keys))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def name_keys_in_output() -> None:
    """In a rank of a recipe, name keys in place of flags in all output of this process."""
    if given := os.environ.get(RECIPE_KEYS):
        keys = json.loads(given)
        sys.stdout = cast(TextIO, _WithKeys(sys.stdout, keys))
        sys.stderr = cast(TextIO, _WithKeys(sys.stderr, keys))
