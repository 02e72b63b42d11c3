"""Measurement of the faster memory format of a backbone's convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.profile.channels_last import OPTION
from megatron_pulse.profile.measurement.compare_formats import FormatTimes, compare_formats
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

    Unchanged, with None, if the options ``given`` set the format, or if the backbone has none.
    """
    options = backbone.record.get("options", {})
    if OPTION in given or OPTION not in options:
        return backbone, None
    plain, last = (
        replace(
            load_recorded({**backbone.record, "options": {**options, OPTION: value}}),
            shares=backbone.shares,
        )
        for value in (False, True)
    )
    times = compare_formats(
        plain, last, micro_batch_size, device, dtype,
        threads=threads, transformer_impl=transformer_impl,
    )  # fmt: skip
    return (last if times is not None and times.channels_last else plain), times
