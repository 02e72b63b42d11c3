"""Captioned images for tests: real digits, and what they are called."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from megatron_pulse.data.images.digits import load_digits

NAMES = "zero one two three four five six seven eight nine".split()


def captioned_digits(root: Path, count: int = 40) -> str:
    """Write ``root/captions`` and return its name as ``--pulse-data`` takes it."""
    folder = root / "captions"
    folder.mkdir()
    images, labels = load_digits("digits8")
    lines = []
    for i in range(count):
        pixels = ((images[i].squeeze() + 1) * 127.5).astype("uint8")
        Image.fromarray(pixels).save(folder / f"{i}.png")
        text = f"a dark digit {NAMES[labels[i]]}"
        lines.append(json.dumps({"file_name": f"{i}.png", "text": text}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return f"captions:{folder}"
