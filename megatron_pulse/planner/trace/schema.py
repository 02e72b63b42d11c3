"""JSON schema of a trace file."""

from __future__ import annotations

from typing import Any

from megatron_pulse.json_validation import (
    NATURAL,
    OBJECT,
    OPERATION,
    TEXT,
    list_of,
    number,
    one_of,
    record,
    table_of,
)
from megatron_pulse.planner.layout.routes import Payload

SCHEMA = 1
"""Version of the schema."""

_TIME = number("a number: seconds", minimum=-1e9, maximum=1e9)
_INTERVAL = {"start_s": _TIME, "end_s": _TIME}
_TRAFFIC = dict.fromkeys(("device", "sent_bytes", "received_bytes", "num_messages"), NATURAL)

_REQUIRED = (
    "schema machine world plan_digest backbone schedule placement device_of_stage num_microbatches"
    " clock clock_accuracy_s stages run steps"
)
TRACE_FORM: dict[str, Any] = record(
    "a trace as a run with --pulse-trace writes it",
    _REQUIRED.split(),
    schema={"const": SCHEMA, "description": f"{SCHEMA} (a trace of this version)"},
    machine=table_of({**TEXT, "minLength": 0}, "an object of texts"),
    world=table_of(NATURAL, "an object of whole numbers"),
    plan_digest=TEXT,
    backbone=OBJECT,
    schedule=TEXT,
    placement=TEXT,
    device_of_stage=list_of(NATURAL, "the device of each stage"),
    num_microbatches={**NATURAL, "maximum": 1_000_000},
    clock=TEXT,
    clock_accuracy_s=number("a number, 0 or more: seconds", minimum=0, maximum=1e9),
    stages=list_of(list_of(TEXT, "names of a stage's layers"), "a list for each stage", least=0),
    run=table_of({**TEXT, "minLength": 0}, "an object of texts"),
    steps=list_of(
        record(
            "a step: step, operations, waits, traffic",
            step=NATURAL,
            operations=list_of(
                record(
                    "an operation: device, op, start_s, end_s",
                    None,
                    device=NATURAL,
                    op=OPERATION,
                    **_INTERVAL,
                ),
                "a list of operations",
            ),
            waits=list_of(
                record(
                    "a wait: device, for, from, source, payload, name, start_s, end_s",
                    None,
                    **{"device": NATURAL, "for": OPERATION, "from": OPERATION, "source": NATURAL},
                    payload=one_of([payload.value for payload in Payload]),
                    name={**TEXT, "minLength": 0},
                    **_INTERVAL,
                ),
                "a list of waits",
                least=0,
            ),
            traffic=list_of(record("traffic", None, **_TRAFFIC), "a list of traffic", least=0),
        ),
        "a list of steps",
        least=0,
    ),
)
