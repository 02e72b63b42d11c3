"""Choice of an adapter: its flags, its record, and the layers that it targets. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, TypedDict

from annotated_types import Gt

from megatron_pulse.dataclass_flags import ABOVE_ZERO, FROM_ONE, flag
from megatron_pulse.errors import Faults, UserError, did_you_mean
from megatron_pulse.json_validation import Count, OneOf, Text

ADAPTERS = ("lora",)
FORMATS = ("diffusers", "peft", "kohya")
"""Formats of adapter files."""
RANK = 16
"""Default rank."""
ATTENTION = (
    "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
)  # fmt: skip
"""Default targets: projections of attention, under the names of diffusers' classes."""


class AdapterRecord(TypedDict):
    """Adapter in a backbone's record."""

    type: Annotated[str, OneOf(ADAPTERS)]
    rank: Count
    alpha: Annotated[float, Gt(0)]
    targets: tuple[Text, ...]


@dataclass(frozen=True)
class Adapter:
    """LoRA (Hu et al. 2021, 2106.09685): W x becomes W x + alpha / rank B A x.

    W is frozen. A begins at random, and B at 0. ``targets`` are names of layers, as in peft: a
    layer matches by its whole name, by its last parts (``attn.to_q``), or by a pattern of these
    (``blocks.*.to_?``).
    """

    rank: int = RANK
    alpha: float = RANK
    targets: tuple[str, ...] = ATTENTION

    @property
    def scale(self) -> float:
        """Factor of the product B A."""
        return self.alpha / self.rank

    def to_record(self) -> dict[str, Any]:
        """JSON values for a backbone's record; ``from_record`` takes them back."""
        return {
            "type": "lora", "rank": self.rank, "alpha": self.alpha, "targets": list(self.targets)
        }  # fmt: skip

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Adapter:
        """Adapter of a backbone's record. Raises ValueError for another type."""
        if record.get("type") not in ADAPTERS:
            raise ValueError(f"adapter type {record.get('type')!r} is unknown: lora")
        return cls(int(record["rank"]), float(record["alpha"]), tuple(record["targets"]))

    def matches(self, layer: str) -> bool:
        """True if the adapter targets the layer of this name."""
        return any(_matches(layer, target) for target in self.targets)

    def require_matches(self, layers: Collection[str]) -> None:
        """Raise Faults for targets that are none of ``layers``, unless they are the default."""
        if self.targets == ATTENTION:
            if not any(map(self.matches, layers)):
                raise Faults([f"the adapter's default targets match no layer; {_some(layers)}"])
            return
        lacking = [t for t in self.targets if not any(_matches(name, t) for name in layers)]
        if lacking:
            ends = {name.rpartition(".")[2] for name in layers}
            raise Faults(
                [
                    f"the adapter's target {target!r} matches no linear layer or convolution; "
                    f"{did_you_mean(target, [*ends, *layers])}{_some(layers)}"
                    for target in lacking
                ]
            )


def _matches(layer: str, target: str) -> bool:
    of_kohya = f"lora_unet_{layer.replace('.', '_')}"
    return fnmatchcase(layer, target) or fnmatchcase(layer, f"*.{target}") or of_kohya == target


def _some(layers: Collection[str]) -> str:
    ends = sorted({name.rpartition(".")[2] for name in layers if not name[-1].isdigit()})
    return f"its layers are called {', '.join(ends[:12])}" if ends else "it has no linear layer"


def describe(record: Mapping[str, Any] | None) -> str:
    """Short text of a record's adapter: ``lora of rank 16, alpha 16 on to_q, to_k``."""
    if not record:
        return "no adapter"
    targets = ", ".join(record["targets"])
    return f"{record['type']} of rank {record['rank']}, alpha {record['alpha']:g} on {targets}"


def _only_with_adapter(name: str) -> Callable[[AdapterChoice], str | None]:
    def check(given: AdapterChoice) -> str | None:
        if given.adapter is not None or getattr(given, name) in (None, ()):
            return None
        return "is for the training of an adapter, and none is given"

    return check


def _file_alone(given: AdapterChoice) -> str | None:
    """Fault of a file of weights beside settings that differ from it."""
    if given.adapter_weights is None:
        return None
    if given.adapter is None:
        return "is for the training of an adapter, and none is given"
    try:
        found = given.record
    except UserError as error:
        return str(error)
    assert found is not None
    told = {
        "rank": (given.adapter_rank, found["rank"]),
        "alpha": (given.adapter_alpha, found["alpha"]),
        "targets": (list(given.adapter_targets) or None, found["targets"]),
    }
    differing = [name for name, (ours, its) in told.items() if ours not in (None, its)]
    return f"has another {' and '.join(differing)}: leave these out" if differing else None


@dataclass(frozen=True)
class AdapterChoice:
    """Flags of an adapter."""

    adapter: str | None = flag(
        "train an adapter and freeze the model: lora (low-rank adaptation)",
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
        "to_q, attn.to_*, blocks.0.* (repeatable; default: the projections of attention)",
        (),
        name="adapter_target",
        metavar="NAME",
        check=_only_with_adapter("adapter_targets"),
    )
    adapter_weights: str | None = flag(
        "begin with the adapter of this file or folder (of diffusers, peft or kohya), which has "
        "rank, alpha and layers",
        metavar="PATH",
        check=_file_alone,
    )

    def of_record(self, record: Mapping[str, Any] | None) -> AdapterChoice:
        """Flags that give the adapter of a record, and begin with the same weights."""
        if record is None:
            return AdapterChoice()
        targets = tuple(record["targets"])
        given = record["type"], record["rank"], record["alpha"], targets, self.adapter_weights
        return AdapterChoice(*given)

    @property
    def record(self) -> dict[str, Any] | None:
        """Record of the adapter; None without one. Raises UserError for an unreadable file."""
        if self.adapter is None:
            return None
        if self.adapter_weights is not None:
            from megatron_pulse.adapters.files import read_adapter

            found = read_adapter(Path(self.adapter_weights))
            return Adapter(found.rank, found.alpha, found.layers).to_record()
        rank = self.adapter_rank or RANK
        alpha = float(rank) if self.adapter_alpha is None else self.adapter_alpha
        return Adapter(rank, alpha, self.adapter_targets or ATTENTION).to_record()
