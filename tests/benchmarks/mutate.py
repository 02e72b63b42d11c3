"""Files as somebody might damage or tamper with them: mutations that know JSON, YAML and CSV."""

from __future__ import annotations

import copy
import json
import random
from typing import Any


class Record(list[tuple[str, Any]]):
    """An object as pairs, so that a key can be there twice."""


EXTREMES: tuple[Any, ...] = (
    1e308, -1e308, 1e-308, 1e300, float("nan"), float("inf"), -1, 0, 1, 2, 3, 0.5, 1.0, 10**30,
    2**63, 2**31, -(2**63), 99_999_999, 999_999_999, 10**400, True, None, "", " ", "x" * 200_000,
    "\ud800", "\x00", "\x1b[2J", "日本語", "🙂", "مرحبا", "../../etc/passwd",
    "<script>alert(1)</script>",
    "%s%n", "nan", "1e308", "NaN", "F0:0", "F999999999:0", "B0:999999999", "X0:0", "fold",
    "sequential", "bidirectional", [], {}, [[]], [1e308], {"a": 1}, "null", "true", "uvit-s",
    "ring", "cuda", "float16", "megatron_pulse plan 1", "megatron_pulse profile 1",
)  # fmt: skip


def tree(value: Any) -> Any:
    """JSON's value with objects as ``Record``."""
    if isinstance(value, dict):
        return Record((key, tree(v)) for key, v in value.items())
    return [tree(v) for v in value] if isinstance(value, list) else value


def dump(value: Any) -> str:
    """JSON, with what JSON forbids written as Python writes it."""
    if isinstance(value, Record):
        return "{" + ", ".join(f"{json.dumps(k)}: {dump(v)}" for k, v in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(dump, value)) + "]"
    if isinstance(value, dict):
        return dump(tree(value))
    if type(value) is int and abs(value) > 10**300:
        return "1" + "0" * 400
    return json.dumps(value)


def places(value: Any) -> list[tuple[Any, int]]:
    """Every item of every container: what holds it, and where."""
    found: list[tuple[Any, int]] = []
    todo = [value]
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            found += [(part, i) for i in range(len(part))]
            todo += [item[1] for item in part] if isinstance(part, Record) else part
    return found


def get(held: Any, i: int) -> Any:
    return held[i][1] if isinstance(held, Record) else held[i]


def put(held: Any, i: int, value: Any) -> None:
    held[i] = (held[i][0], value) if isinstance(held, Record) else value


def mutate_tree(value: Any, rng: random.Random) -> str:
    """Change ``value`` at one place; returns how."""
    spots = places(value)
    if not spots:
        return "nothing"
    # Top-level fields as often as the many items of long lists.
    shallow = [(value, i) for i in range(len(value))] if isinstance(value, list) else spots
    held, i = rng.choice(shallow if rng.random() < 0.3 else spots)
    how = rng.choice(
        ("delete", "repeat", "retype", "extreme", "extreme", "nudge", "nudge", "swap", "rename",
         "nest", "borrow", "insert")
    )  # fmt: skip
    now = copy.deepcopy(get(held, i))
    if how == "delete":
        del held[i]
    elif how == "repeat":
        new = rng.choice([now, copy.deepcopy(rng.choice(EXTREMES))])
        held.insert(i, (held[i][0], new) if isinstance(held, Record) else now)
    elif how == "retype":
        put(held, i, rng.choice([[now], {"value": now}, str(now), None, bool(now), 7, [], {}]))
    elif how == "extreme":
        put(held, i, copy.deepcopy(rng.choice(EXTREMES)))
    elif how == "nudge":
        if isinstance(now, bool):
            put(held, i, not now)
        elif isinstance(now, int | float):
            put(held, i, rng.choice([now + 1, now - 1, now * 2, now * 1000, now / 2, -now]))
        elif isinstance(now, str):
            put(held, i, rng.choice([now[:-1], now + "x", now.upper(), now + " ", now[::-1]]))
        elif isinstance(now, list):
            rng.shuffle(now)
            put(held, i, now)
    elif how == "swap":
        j = rng.randrange(len(held))
        other = get(held, j)
        put(held, j, now)
        put(held, i, other)
    elif how == "rename":
        if isinstance(held, Record):
            key = held[i][0]
            held[i] = (rng.choice([key + "s", key.upper(), key[:-1], "x", ""]), now)
        else:
            held.pop(i)
    elif how == "nest":
        for _ in range(rng.choice([1, 3, 40])):
            now = [now]
        put(held, i, now)
    elif how == "borrow":
        other, j = rng.choice(spots)
        put(held, i, copy.deepcopy(get(other, j)))
    else:
        new = copy.deepcopy(rng.choice([now, *EXTREMES]))
        held.insert(i, ("surprise", new) if isinstance(held, Record) else new)
    return how


def mutate_bytes(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """The file with bytes that nobody meant; and how."""
    how = rng.choice(
        ("truncate", "flip", "flip", "insert", "cut", "twice", "empty", "utf-16", "latin-1", "bom",
         "brackets", "zero", "crlf", "digit", "digit", "digit")
    )  # fmt: skip
    spot = rng.randrange(len(content) + 1)
    if how == "truncate":
        content = content[:spot]
    elif how == "flip" and content:
        changed = bytearray(content)
        for _ in range(rng.choice([1, 1, 5])):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        content = bytes(changed)
    elif how == "insert":
        junk = rng.choice(
            [b"\xff\xfe", b"\0", b"{", b"]", b'"', b",", b"\n", b"NaN", b"&a *a ", b"- "]
        )
        content = content[:spot] + junk + content[spot:]
    elif how == "cut":
        content = content[:spot] + content[spot + rng.randrange(1, 200) :]
    elif how == "twice":
        content = content + content
    elif how == "empty":
        content = rng.choice([b"", b"\n", b"{}", b"[]", b"null", b"1"])
    elif how in ("utf-16", "latin-1"):
        content = content.decode("utf-8", "replace").encode(how, "replace") + b"\xe9"
    elif how == "bom":
        content = b"\xef\xbb\xbf" + content
    elif how == "brackets":
        content = rng.choice([b"[" * 100_000, b'{"a":' * 100_000, b"[" + content, b"- " * 50_000])
    elif how == "zero":
        content = content[:spot] + b"\0" * 1000 + content[spot:]
    elif how == "crlf":
        content = content.replace(b"\n", b"\r\n")
    else:
        digits = [i for i, byte in enumerate(content) if 48 <= byte <= 57]
        if digits:
            i = rng.choice(digits)
            content = content[:i] + bytes([rng.randrange(48, 58)]) + content[i + 1 :]
    return content, how


def mutate_cells(text: str, rng: random.Random) -> tuple[str, str]:
    """A CSV file with other cells; and how."""
    rows = [line.split(",") for line in text.splitlines()]
    how = rng.choice(
        ("delete", "repeat", "swap", "other", "other", "long", "quote", "rows", "drop row", "blank")
    )
    row = rng.choice(rows)
    i = rng.randrange(len(row))
    if how == "delete":
        del row[i]
    elif how == "repeat":
        row.insert(i, row[i])
    elif how == "swap":
        j = rng.randrange(len(row))
        row[i], row[j] = row[j], row[i]
    elif how == "other":
        row[i] = rng.choice(
            ["0F999999999", "99999999999F0", "999999999B0", "٣F0", "-1F0", "0Q0", "0F", "F0:0",
             "0f0", "0F0 ", "1F1", "0I0", "0W0", "0X0", "=1+1", "\x00", "🙂"]
        )  # fmt: skip
    elif how == "long":
        row[i] = rng.choice(["0" * 131_073, "0F" + "1" * 131_073, "1" * 5000 + "F0"])
    elif how == "quote":
        row[i] = '"' + row[i] + rng.choice(["", '"', '""', "\n"])
    elif how == "rows":
        rng.shuffle(rows)
    elif how == "drop row":
        rows.remove(row)
    else:
        row[i] = rng.choice(["", " "])
    return "".join(",".join(cells) + "\n" for cells in rows), how
