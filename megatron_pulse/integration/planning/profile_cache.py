"""Disk cache of measured profiles, so that a second run of a backbone starts without measuring.

There is a file for each backbone, device, dtype, microbatch sizes and way of running; the folder
is ``profiles`` in the cache's (``files.cache_folder``). Its removal costs only time. A profile that
cannot be read counts as missing. One that does not have the backbone's layers is measured again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.files import cache_folder, digest_of_sources
from megatron_pulse.profile.files import load_profile, save_profile
from megatron_pulse.profile.measurement.machine import driver, measured_device, num_threads
from megatron_pulse.profile.profile import Profile, ProfileError


def cached_profile(
    backbone: Backbone,
    device: torch.device,
    settings: Sequence[object],
    measure: Callable[[], Profile],
) -> tuple[Profile, Path | None]:
    """Stored profile and its file; else what ``measure`` returns, which is stored, and None.

    ``settings`` are all that ``measure`` depends on besides backbone and device, as dtype and
    microbatch sizes. Raises only the exceptions of ``measure``.
    """
    path = cache_folder() / "profiles" / f"{_key(backbone, device, settings)}.json"
    with suppress(OSError, ProfileError):
        known = load_profile(path)
        names = [layer.name for layer in known.layers]
        if names == [layer.name for layer in backbone.layers]:
            return known, path
    found = measure()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_profile(found, path)
    return found, None


def _key(backbone: Backbone, device: torch.device, settings: Sequence[object]) -> str:
    """Digest that is equal for equal measurements, by equal code."""
    layers = [
        (layer.name, layer.inputs, layer.outputs, layer.uses, layer.trained)
        for layer in backbone.layers
    ]
    name = measured_device(device, num_threads(device))
    what = [
        backbone.record, layers, backbone.skips, name, driver(), torch.__version__, _code(),
        *settings,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()[:40]


def _code() -> str:
    """Digest of the code that is measured and that measures."""
    package = Path(__file__).parents[2]
    parts = (package / name for name in ("adapters", "backbone", "profile", "runtime", "tracing"))
    return digest_of_sources(*parts, package.parent / "model_specs")
