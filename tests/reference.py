"""Files of ours as a person edits them: the hash has to go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_pulse.files import HASH


def unsealed_record(path: str | Path) -> dict[str, Any]:
    """What a JSON file of ours says beside its hash, which must be there."""
    record: dict[str, Any] = json.loads(Path(path).read_text())
    del record[HASH]
    return record
