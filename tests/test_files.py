"""Whatever is in a file, it is read as what it says or refused in one sentence, soon."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_pulse.errors import LOOKED_FOR, UserError
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import (
    MAX_BYTES,
    MAX_VALUES,
    FileError,
    read_json,
    read_text,
    read_yaml,
    unwritable,
)
from megatron_pulse.planner.cluster.cluster import cluster, load_cluster, save_cluster

REFUSED = {
    "empty": (b" \n", "it is empty"),
    "no text": (b'{"a": "\xff"}', "not UTF-8 text (byte 7)"),
    "utf-16": ("{}".encode("utf-16"), "not UTF-8 text"),
    "no json": (b"{", "it is not JSON: Expecting property name"),
    "list": (b"[1]", "expected an object, got a list"),
    "number": (b"12", "expected an object, got 12"),
    "brackets": (b"[" * 100_000, "nested more than 32 deep"),
    "deep": (b'{"a":' * 40 + b"1" + b"}" * 40, "nested more than 32 deep"),
    "large": (b'{"a": [0, 1e308]}', "a.1 is a number 1e+308; numbers are 0, or from 1e-30"),
    "small": (b'{"a": 1e-300}', "a is a number 1e-300"),
    "infinite": (b'{"a": -Infinity}', "a is a number -inf"),
    "overflow": (b'{"a": 1e999}', "a is a number inf"),
    "nan": (b'{"a": {"b c": NaN}}', "a.b c is a number nan"),
    "whole": (b'{"a": 1' + b"0" * 400 + b"}", "a is a number of 1329 bits"),
    "digits": (b'{"a": 1' + b"0" * 5000 + b"}", "it is not JSON"),
    "repeated": (b'{"a": {"b": 1, "c": 2, "b": 3}}', "the key 'b' occurs more than once"),
    "half a letter": (b'{"a": "\\ud800"}', r"a has the character '\ud800'"),
    "control": (b'{"a\\u001b": 1}', r"the key has the character '\x1b'"),
    "long key": (b'{"' + b"k" * 1001 + b'": 1}', "the key has 1,001 characters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused(case: str, tmp_path: Path) -> None:
    content, reason = REFUSED[case]
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(FileError) as error:
        read_json(path, FileKind.PLAN)
    message = str(error.value)
    assert message.startswith(f"{path} cannot be read as a plan: ") and reason in message
    message.encode()  # it can be printed


def test_all_faults_are_told_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"x": 1, "x": 2, "t": [' + ",".join(["NaN"] * 201) + "]}")
    with pytest.raises(FileError) as error:
        read_json(path, FileKind.PROFILE)
    assert "(202 faults):" in str(error.value)
    assert "'x' occurs more than once" in str(error.value)
    assert "and 198 more like it" in str(error.value)


@pytest.mark.parametrize("value", ["[]", "{}", "0", '""'])
def test_no_more_values_are_read_than_anything_of_ours_has(value: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"a": [' + f"{value}," * MAX_VALUES + "1]}")
    assert path.stat().st_size < MAX_BYTES
    with pytest.raises(FileError, match="it has up to [0-9,]+ values; at most 4,000,000"):
        read_json(path, FileKind.PLAN)


@pytest.mark.parametrize("value", ["1e99", '"\\u0001"', "NaN"])
def test_of_many_faults_the_first_are_looked_for(value: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"a": [' + f"{value}," * (2 * LOOKED_FOR) + "1]}")
    with pytest.raises(FileError, match="and more: the search stops after 1,000") as error:
        read_json(path, FileKind.PLAN)
    assert "- a.0 " in str(error.value) and "- a.2 " in str(error.value)
    path.write_text("{" + ",".join(f'"{i}": 1' for i in range(2 * LOOKED_FOR)) + "}")
    with pytest.raises(UserError, match="and more: the search stops after 1,000"):
        load_cluster(path)


def test_places_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "none", "No such file"),
        (tmp_path / "pipe", "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / ("n" * 300), "File name too long"),
        (tmp_path / "a\0b", "null byte"),
    ):
        with pytest.raises(FileError, match=reason):
            read_text(path, FileKind.TRACE)
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(FileError, match="larger than 65,536 KiB"):
        read_json(tmp_path / "huge.json", FileKind.TRACE)


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"name": "\xc3\xa4"}')
    assert read_json(tmp_path / "a.json", FileKind.PLAN) == {"name": "ä"}


KINDS = {
    FileKind.PLAN: {"format": "megatron_pulse plan 1"},
    FileKind.PROFILE: {"format": "megatron_pulse profile 1"},
    FileKind.TRACE: {"schema": 1, "steps": [], "clock": "boot"},
    FileKind.TABLE: {"units": [], "skips": []},
    FileKind.TIMES: {"forward": [1], "backward": [2]},
    FileKind.CLUSTER: {"nodes": 1, "devices_per_node": 2, "links": {}},
    FileKind.MODEL: {"_class_name": "UNet2DConditionModel"},
    FileKind.PIPELINE: {"_class_name": "StableDiffusionPipeline"},
    FileKind.SCHEDULER: {"_class_name": "DDIMScheduler"},
}


@pytest.mark.parametrize("given", KINDS)
@pytest.mark.parametrize("wanted", KINDS)
def test_a_file_of_another_kind_is_named(given: FileKind, wanted: FileKind, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(json.dumps(KINDS[given]))
    read = read_yaml if wanted is FileKind.CLUSTER else read_json
    if given is wanted:
        assert read(path, wanted) == KINDS[given]
        return
    with pytest.raises(FileError) as error:
        read(path, wanted)
    assert f"{path}: this is {given}, not {wanted}: " in str(error.value)


def test_yaml_holds_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("a: 010\nb: 1:30\nc: yes\nd: 2001-02-03\ne: 1e3\nf: 0x10\ng: ~\nh: true\ni: -7")
    assert read_yaml(path, FileKind.CLUSTER) == {
        "a": "010", "b": "1:30", "c": "yes", "d": "2001-02-03", "e": 1000.0, "f": "0x10",
        "g": None, "h": True, "i": -7,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: &x [1]\nb: [*x, *x]", "aliases and tags are unsupported"),
        ("a: 1\nb: {c: 1, c: 2}", "the key 'c' occurs more than once"),
        ("1: 2", "keys must be text"),
        ("? [a]\n: 2", "keys must be text"),
        ("a: !!python/object:os.system x", "aliases and tags are unsupported"),
        ("a: !!binary gIGC", "aliases and tags are unsupported"),
        ("a: [", "it is not plain YAML"),
        ("a: 1\n--- \nb: 2", "it is not plain YAML"),
        ("- " * 3000, "nested more than 32 deep"),
        ("a: " + "[" * 3000, "nested more than 32 deep"),
        ("# " + "x" * 70_000, "larger than 64 KiB"),
        ("a: 1e308", "a is a number 1e\\+308"),
        ("a: 1" + "0" * 5000, "digits"),
        ('a: "\\x07"', "has the character"),
    ],
)
def test_yaml_that_cannot_be_meant_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(FileError, match=f"cannot be read as a cluster: (.|\n)*{reason}"):
        read_yaml(path, FileKind.CLUSTER)


@pytest.mark.parametrize(
    "name", ["yes", "1e5", "010", "1:30", "~", "null", "ä", "🙂", "2001-01-01"]
)
def test_clusters_of_any_name_are_read_as_written(name: str, tmp_path: Path) -> None:
    from dataclasses import replace

    made = replace(cluster("cpu"), name=name)
    save_cluster(made, tmp_path / "c.yaml")
    assert load_cluster(tmp_path / "c.yaml") == made


def test_where_nothing_can_be_written_is_told_though_permissions_allow_it(tmp_path: Path) -> None:
    """Below /proc root may write by its permissions, and cannot."""
    assert unwritable(tmp_path / "new" / "folder") is None
    assert not list(tmp_path.iterdir())
    assert "/proc is not writable" in str(unwritable(Path("/proc/new")))
    (tmp_path / "file").write_text("")
    assert "is a file, not a folder" in str(unwritable(tmp_path / "file" / "new"))
