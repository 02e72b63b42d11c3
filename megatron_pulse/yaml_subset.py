"""YAML restricted to JSON's values: no repeated keys, aliases or tags."""

from __future__ import annotations

import re
from typing import Any

import yaml

_NULL = re.compile(r"^(?:~|null|)$")
_BOOL = re.compile(r"^(?:true|false)$")
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$")
_FLOAT = re.compile(r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$")


class PlainLoader(yaml.SafeLoader):
    """Loader of plain YAML; raises yaml.YAMLError."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.tag is not None:
            told = "aliases and tags are unsupported. Write the value out"
            raise yaml.MarkedYAMLError(None, None, told, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise yaml.MarkedYAMLError(None, None, "keys must be text", key.start_mark)
            if key.value in seen:
                told = f"the key {key.value[:60]!r} occurs more than once"
                raise yaml.MarkedYAMLError(None, None, told, key.start_mark)
            seen.add(key.value)
        return dict(super().construct_mapping(node, deep))


class PlainDumper(yaml.SafeDumper):
    """Dumper whose output ``PlainLoader`` and other YAML readers interpret equally."""


def _whole(loader: yaml.SafeLoader, node: Any) -> int:
    return int(loader.construct_scalar(node))


def _fraction(loader: yaml.SafeLoader, node: Any) -> float:
    return float(loader.construct_scalar(node))


PlainLoader.add_constructor("tag:yaml.org,2002:int", _whole)
PlainLoader.add_constructor("tag:yaml.org,2002:float", _fraction)
for _name, _pattern, _first in (
    ("null", _NULL, ["~", "n", ""]),
    ("bool", _BOOL, ["t", "f"]),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
):
    for _class in (PlainLoader, PlainDumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, _first)
