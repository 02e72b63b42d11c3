"""Adapters of a model: settings, record, and the layers that they target. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, NotRequired, TypedDict

from annotated_types import Gt, Lt

from megatron_pulse.errors import Faults, did_you_mean
from megatron_pulse.json_validation import Count, OneOf, Text

ADAPTERS = ("lora", "dora", "lokr")
FORMATS = ("diffusers", "peft", "kohya")
"""Formats of adapter files."""
RANK = 16
"""Default rank."""
NEAREST = -1
"""Factor of LoKr that divides a dimension near its square root."""
ATTENTION = (
    "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
)  # fmt: skip
"""Default targets: projections of attention, under the names of diffusers' classes."""
DEFAULT_TARGETS = (
    ATTENTION,
    ("self_attention.*", "cross_attention.*"),  # Kandinsky 5 and 6
    ("img_attn_qkv", "img_attn_proj", "txt_attn_qkv", "txt_attn_proj"),  # JoyImage
    ("attn.qkv", "attn.proj"),  # U-ViT, Sana-WM
    ("query", "key", "value", "proj_attn"),  # UNet1D
    ("linear_qkv", "linear_q", "linear_kv", "linear_proj"),  # families in unpublished sizes
)
"""Projections of attention by convention of names: a model's default is the first that matches."""


class AdapterRecord(TypedDict):
    """Adapter in a backbone's record."""

    type: Annotated[str, OneOf(ADAPTERS)]
    rank: Count
    alpha: Annotated[float, Gt(0)]
    targets: tuple[Text, ...]
    dropout: NotRequired[Annotated[float, Gt(0), Lt(1)]]
    factor: NotRequired[Count]


@dataclass(frozen=True)
class Adapter:
    """Adapter: LoRA (2106.09685), DoRA (2402.09353), or LoKr (2309.14859).

    With D = alpha / rank B A, LoRA makes W x into W x + D x. DoRA makes it m / |W + D| (W x + D x),
    with the norms of rows, a trained magnitude m that begins as |W|, and no gradient of the norm.
    LoKr has D = alpha / rank W1 (x) W2: a Kronecker product, with W2 = A B if the rank is small.
    ``factor`` is the first number of rows and of columns (see ``kronecker.divide``).

    W is frozen. A begins at random, B and W1 at 0. ``targets`` are names of layers, as in peft: a
    layer matches by its whole name, by its last parts (``attn.to_q``), or by a pattern of these
    (``blocks.*.to_?``). ``dropout`` is the probability with which training drops an entry of x in
    the added term.
    """

    rank: int = RANK
    alpha: float = RANK
    targets: tuple[str, ...] = ATTENTION
    dropout: float = 0.0
    type: str = "lora"
    factor: int = NEAREST

    @property
    def scale(self) -> float:
        """Factor of the product B A."""
        return self.alpha / self.rank

    def to_record(self) -> dict[str, Any]:
        """JSON values for a backbone's record; ``from_record`` takes them back."""
        record: dict[str, Any] = {
            "type": self.type, "rank": self.rank, "alpha": self.alpha, "targets": list(self.targets)
        }  # fmt: skip
        record |= {"dropout": self.dropout} if self.dropout else {}
        return record | ({"factor": self.factor} if self.factor != NEAREST else {})

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Adapter:
        """Adapter of a backbone's record. Raises ValueError for another type."""
        if record.get("type") not in ADAPTERS:
            known = ", ".join(ADAPTERS)
            raise ValueError(f"adapter type {record.get('type')!r} is unknown; there is {known}")
        return cls(
            int(record["rank"]),
            float(record["alpha"]),
            tuple(record["targets"]),
            float(record.get("dropout", 0.0)),
            record["type"],
            int(record.get("factor", NEAREST)),
        )

    def matches(self, layer: str) -> bool:
        """True if the adapter targets the layer of this name."""
        return any(_matches(layer, target) for target in self.targets)

    def fitted(self, layers: Collection[str]) -> Adapter:
        """This adapter with the default targets of a model's ``layers``, unless it has others."""
        if self.targets != ATTENTION:
            return self
        every = (replace(self, targets=targets) for targets in DEFAULT_TARGETS)
        return next((each for each in every if any(map(each.matches, layers))), self)

    def require_matches(self, layers: Collection[str]) -> None:
        """Raise Faults for targets that are none of ``layers``, unless they are the default."""
        if self.targets in DEFAULT_TARGETS:
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
    by_name = fnmatchcase(layer, target) or fnmatchcase(layer, f"*.{target}")
    return by_name or kohya_name(layer) == target


def kohya_name(layer: str) -> str:
    """Name of a UNet's layer in kohya's files."""
    return f"lora_unet_{layer.replace('.', '_')}"


def _some(layers: Collection[str]) -> str:
    ends = sorted({name.rpartition(".")[2] for name in layers if not name[-1].isdigit()})
    return f"its layers are called {', '.join(ends[:12])}" if ends else "it has no linear layer"


def describe(record: Mapping[str, Any] | None) -> str:
    """Short text of a record's adapter: ``lora of rank 16, alpha 16 on to_q, to_k``."""
    if not record:
        return "no adapter"
    targets = ", ".join(record["targets"])
    dropout = f", dropout {record['dropout']:g}" if record.get("dropout") else ""
    factor = f", factor {record['factor']}" if record.get("factor") else ""
    size = f"rank {record['rank']}, alpha {record['alpha']:g}{factor}{dropout}"
    return f"{record['type']} of {size} on {targets}"
