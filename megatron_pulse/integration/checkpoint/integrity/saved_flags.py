"""Checks of a checkpoint's flags, before anything relies on them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Annotated, Any, NotRequired, TypedDict

from megatron_pulse.adapters.adapter import AdapterRecord
from megatron_pulse.adapters.quantization import QUANTIZATIONS
from megatron_pulse.data.data_record import saved_faults
from megatron_pulse.errors import describe_exception
from megatron_pulse.integration.checkpoint.diffusion_process import saved_process
from megatron_pulse.json_validation import OneOf, Text, faults_of


class _Backbone(TypedDict):
    name: Text
    options: Mapping[str, Any]
    family: NotRequired[Text]
    train: NotRequired[tuple[Text, ...]]
    freeze: NotRequired[tuple[Text, ...]]
    adapter: NotRequired[AdapterRecord]
    quantization: NotRequired[Annotated[str, OneOf(QUANTIZATIONS)]]
    kept: NotRequired[Mapping[str, Any]]


class _Flags(TypedDict):
    pulse_record: Annotated[
        _Backbone,
        "a backbone's record: name, options, family, train, freeze, adapter, quantization, kept",
    ]


_TEXT, _NUMBER = ("a text, or None", (str, NoneType)), ("a number, or None", (int, float, NoneType))
_COUNT, _SWITCH = ("a whole number, or None", (int, NoneType)), ("True or False", (bool,))
_FLAGS: dict[str, tuple[str, tuple[type, ...]]] = {
    "pulse_data": _TEXT,
    "pulse_encoders": _TEXT,
    "pulse_base": _TEXT,
    "pulse_frozen_weights": ("a mapping, or None", (dict, NoneType)),
    "pulse_encoded_by": ("a mapping, or None", (dict, NoneType)),
    "pulse_process": ("a mapping, or None", (dict, NoneType)),
    "pulse_lr_schedule": ("a mapping, or None", (dict, NoneType)),
    "pulse_ema_decay": _NUMBER,
    "pulse_self_conditioning": _NUMBER,
    "pulse_boundary_ratio": _NUMBER,
    "pulse_reached_loss": _NUMBER,
    "pulse_reached_by": _TEXT,
    "consumed_train_samples": ("a whole number", (int,)),
    "global_batch_size": _COUNT,
    "train_samples": _COUNT,
    "seed": _COUNT,
    "optimizer": _TEXT,
    "use_distributed_optimizer": _SWITCH,
    "bf16": _SWITCH,
    "fp16": _SWITCH,
}
"""Allowed types of the flags that runs and commands rely on."""


def is_ours(common: Any) -> bool:
    """True if the ``common`` state of a checkpoint was written by a run of megatron_pulse."""
    args = common.get("args") if isinstance(common, dict) else None
    return isinstance(args, argparse.Namespace) and hasattr(args, "pulse_record")


def find_flag_faults(args: argparse.Namespace) -> Iterator[str]:
    """Faults of a run's flags, which no run has written so."""
    yield from faults_of(_Flags, {"pulse_record": args.pulse_record})
    wrong = {
        name: allowed
        for name, (allowed, kinds) in _FLAGS.items()
        if hasattr(args, name) and type(getattr(args, name)) not in kinds
    }
    for name, allowed in wrong.items():
        yield f"{name} is {repr(getattr(args, name))[:60]}; allowed is {allowed}"
    if getattr(args, "pulse_data_record", None) is not None:
        yield from saved_faults(args.pulse_data_record)
    if not wrong:
        try:
            saved_process(args)
        except Exception as error:  # of many kinds, for values that no flag has
            yield f"its diffusion process: {describe_exception(error)}"
