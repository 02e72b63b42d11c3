"""Flags of an adapter. Imports no torch until they name a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_pulse.adapters.adapter import (
    ADAPTERS,
    ATTENTION,
    DEFAULT_TARGETS,
    NEAREST,
    RANK,
    Adapter,
)
from megatron_pulse.adapters.quantization import QUANTIZATIONS, installation_fault
from megatron_pulse.dataclass_flags import ABOVE_ZERO, BELOW_ONE, FROM_ONE, flag
from megatron_pulse.errors import UserError

_WITHOUT = "is for an adapter: give --pulse-adapter TYPE too, or leave it out"


def _only_with_adapter(name: str) -> Callable[[AdapterChoice], str | None]:
    def check(given: AdapterChoice) -> str | None:
        if given.adapter is not None or getattr(given, name) in (None, ()):
            return None
        return _WITHOUT

    return check


def _quantization(given: AdapterChoice) -> str | None:
    """Fault of a quantisation without an adapter, or without the library that it needs."""
    fault = _only_with_adapter("quantization")(given) or installation_fault(given.quantization)
    if given.quantization is not None and given.adapter == "dora":
        fault = "is not for dora, which needs the norms of the weights: take lora"
    return fault and f"{given.quantization} {fault}"


def _dropout(given: AdapterChoice) -> str | None:
    if given.adapter == "lokr" and given.adapter_dropout:
        return "is not for lokr: leave it out, or take lora"
    return _only_with_adapter("adapter_dropout")(given)


def _factor(given: AdapterChoice) -> str | None:
    if given.adapter_factor is not None and given.adapter not in (None, "lokr"):
        return f"is for lokr, and the adapter is {given.adapter}: leave it out"
    return _only_with_adapter("adapter_factor")(given)


def _file_alone(given: AdapterChoice) -> str | None:
    """Fault of a file of weights beside settings that differ from it."""
    if given.adapter_weights is None:
        return None
    if given.adapter is None:
        return _WITHOUT
    try:
        found = given.record
    except UserError as error:
        return str(error)
    assert found is not None
    told = {
        "type": (given.adapter, found["type"]),
        "rank": (given.adapter_rank, found["rank"]),
        "alpha": (given.adapter_alpha, found["alpha"]),
        "targets": (list(given.adapter_targets) or None, found["targets"]),
        "factor": (given.adapter_factor, found.get("factor")),
    }
    differing = [
        f"{name} {its if name != 'targets' else 'of its own'}, not {ours}"
        for name, (ours, its) in told.items()
        if ours not in (None, its)
    ]
    if not differing:
        return None
    return f"{given.adapter_weights} has {' and '.join(differing)}: leave out what it says"


@dataclass(frozen=True)
class AdapterChoice:
    """Flags of an adapter."""

    adapter: str | None = flag(
        "train an adapter and freeze the model: lora, dora, or lokr (Kronecker products, of traced "
        "modules)",
        choices=ADAPTERS,
    )
    adapter_rank: int | None = flag(
        f"rank of the adapter (default {RANK})",
        metavar="R",
        within=FROM_ONE,
        check=_only_with_adapter("adapter_rank"),
    )
    adapter_alpha: float | None = flag(
        "alpha of the adapter: its effect is multiplied by alpha / rank (default: the rank)",
        metavar="A",
        within=ABOVE_ZERO,
        check=_only_with_adapter("adapter_alpha"),
    )
    adapter_targets: tuple[str, ...] = flag(
        "layers that the adapter changes, by the ends of their names in diffusers or by patterns: "
        "to_q, attn.to_*, blocks.0.* (repeatable; default: those of attention)",
        (),
        name="adapter_target",
        metavar="NAME",
        check=_only_with_adapter("adapter_targets"),
    )
    adapter_dropout: float | None = flag(
        "probability with which training drops an entry of an adapter's input (default 0)",
        metavar="P",
        within=BELOW_ONE,
        check=_dropout,
    )
    adapter_weights: str | None = flag(
        "begin with the adapter of this file or folder (of diffusers, peft or kohya), which has "
        "rank, alpha and layers",
        metavar="PATH",
        check=_file_alone,
    )
    quantization: str | None = flag(
        "keep the frozen weights of the blocks' linear layers quantised, of a diffusers model: nf4 "
        "(as bitsandbytes), int8, or fp8 (as published)",
        choices=QUANTIZATIONS,
        check=_quantization,
    )
    adapter_factor: int | None = flag(
        "of lokr: rows and columns of the first factor (default: near the roots of the weight's)",
        metavar="N",
        within=FROM_ONE,
        check=_factor,
    )

    def of_record(
        self, record: Mapping[str, Any] | None, quantization: str | None
    ) -> AdapterChoice:
        """Flags that give the adapter of a record, and begin with the same weights."""
        if record is None:
            return AdapterChoice()
        targets = tuple(record["targets"])
        dropout = record.get("dropout")
        given = record["type"], record["rank"], record["alpha"], targets, dropout
        return AdapterChoice(*given, self.adapter_weights, quantization, record.get("factor"))

    def describes(self, record: Mapping[str, Any] | None) -> bool:
        """True if these flags give the adapter of a record, whose targets may be a default."""
        if (ours := self.record) is None or record is None:
            return ours == record
        found = [tuple(each["targets"]) for each in (ours, record)]
        if found[0] == ATTENTION and found[1] in DEFAULT_TARGETS:
            ours["targets"] = record["targets"]
        return ours == record

    @property
    def record(self) -> dict[str, Any] | None:
        """Record of the adapter; None without one. Raises UserError for an unreadable file."""
        if self.adapter is None:
            return None
        if self.adapter_weights is not None:
            from megatron_pulse.adapters.files import read_adapter

            found = read_adapter(Path(self.adapter_weights))
            dropout = found.dropout if self.adapter_dropout is None else self.adapter_dropout
            told = found.rank, found.alpha, found.layers, dropout, found.type, found.factor
            return Adapter(*told).to_record()
        rank = self.adapter_rank or RANK
        alpha = float(rank) if self.adapter_alpha is None else self.adapter_alpha
        targets = self.adapter_targets or ATTENTION
        dropout, factor = self.adapter_dropout or 0.0, self.adapter_factor or NEAREST
        return Adapter(rank, alpha, targets, dropout, self.adapter, factor).to_record()
