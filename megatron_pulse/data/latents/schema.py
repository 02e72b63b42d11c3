"""Schema of the ``meta.json`` of a folder of latents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_pulse.json_validation import (
    COUNT,
    FLAG,
    NATURAL,
    TEXT,
    faults_of,
    list_of,
    one_of,
    record,
    table_of,
)
from megatron_pulse.paths import is_file_name

_SIZE = {**COUNT, "maximum": 1 << 20, "description": "a whole number from 1 to 1048576"}
_FILE = record("a file: name, num_bytes, sha256", name=TEXT, num_bytes=NATURAL, sha256=TEXT)
_FIELD = record("a field: shape, dtype", shape=list_of(_SIZE, "sizes", least=0), dtype=TEXT)


def meta_faults(content: dict[str, Any], form: int, dtypes: list[str]) -> list[str]:
    """Every fault of the file's content, for its version; ``dtypes`` are those of latents."""
    faults = faults_of(_schema(form, dtypes), content)
    return faults or list(_misfits(content))


def _schema(form: int, dtypes: list[str]) -> dict[str, Any]:
    layout = record(
        "a layout: shape, num_classes, dtype, fields, pixel_size, shard_size, source",
        shape=list_of(_SIZE, "sizes"),
        num_classes={**NATURAL, "maximum": 1 << 30},
        dtype=one_of(dtypes),
        fields=table_of(_FIELD, "fields by name"),
        pixel_size={
            "anyOf": [{"type": "null"}, {**list_of(_SIZE, "", least=2), "maxItems": 2}],
            "description": "[height, width], or null",
        },
        shard_size=COUNT,
        source={**TEXT, "minLength": 0},
    )
    layout["properties"]["made_by"] = table_of({**TEXT, "minLength": 0}, "texts by field")
    layout["properties"] |= {"deviates": FLAG, "pictures": FLAG, "groups": FLAG}
    layout["properties"]["classes"] = list_of(TEXT, "names of classes", least=0)
    # Later versions say more of a layout, which ``LatentLayout`` knows or refuses.
    layout["additionalProperties"] = True
    return record(
        "what a LatentWriter writes",
        format={"const": form, "description": f"{form} (this version of megatron_pulse)"},
        layout=layout,
        nulls=table_of(_FILE, "files by the field's name"),
        shards=list_of(
            record(
                "a shard: count, files, hashes",
                ["count", "files"],
                count={**COUNT, "maximum": 1 << 40},
                files=table_of(_FILE, "files by the field's name"),
                hashes={"anyOf": [{"type": "null"}, _FILE], "description": "a file, or null"},
            ),
            "a list of shards",
            least=0,
        ),
        complete=FLAG,
    )


def _misfits(content: dict[str, Any]) -> Iterator[str]:
    """Faults of files outside the folder, and of fields without a file."""
    layout = content["layout"]
    fields = set(layout["fields"])
    optional = {"deviates": "deviation", "pictures": "picture", "groups": "group"}
    columns = {"latent", "label", *fields}
    columns |= {name for flag, name in optional.items() if layout.get(flag)}
    places = [("nulls", content["nulls"])]
    for i, shard in enumerate(content["shards"]):
        places.append((f"shards.{i}.files", shard["files"]))
        if shard.get("hashes"):
            places.append((f"shards.{i}", {"hashes": shard["hashes"]}))
        for name in sorted(columns ^ shard["files"].keys()):
            has = "is of no field" if name in shard["files"] else "is missing"
            yield f"shards.{i}.files.{name} {has}"
    yield from (f"nulls.{name} is of no field" for name in content["nulls"] if name not in fields)
    for where, files in places:
        for field, file in files.items():
            name = file["name"]
            if not is_file_name(name):
                yield f"{where}.{field}.name is {name[:60]!r}; it must be a file in the folder"
