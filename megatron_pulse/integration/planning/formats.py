"""Measuring in which memory format a backbone's convolutions are faster here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.profile.measuring.formats import FormatTimes, compare_formats
from megatron_pulse.profile.memory_format import OPTION
from model_specs import load_recorded


def measured_format(
    backbone: Backbone,
    given: Mapping[str, Any],
    micro_batch_size: int,
    device: str,
    dtype: str,
    threads: int | None,
    transformer_impl: str,
) -> tuple[Backbone, FormatTimes | None]:
    """``backbone`` in the memory format that is faster on ``device``, and both formats' times.

    As it is, with None, where the options that were ``given`` say which, or it has none.
    """
    options = backbone.record.get("options", {})
    if OPTION in given or OPTION not in options:
        return backbone, None
    plain, last = (
        load_recorded({**backbone.record, "options": {**options, OPTION: value}})
        for value in (False, True)
    )
    times = compare_formats(
        plain, last, micro_batch_size, device, dtype,
        threads=threads, transformer_impl=transformer_impl,
    )  # fmt: skip
    return (last if times is not None and times.channels_last else plain), times
