"""Certificate of ``pulse verify``: the plan, the environment, and the result for each layer."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt

from megatron_pulse.backbone.layer_selection import name_of
from megatron_pulse.errors import Faults, UserError, format_faults
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_json, write_with_checksum
from megatron_pulse.format import with_plural
from megatron_pulse.json_validation import Count, Natural, OneOf, Some, Text, validated
from megatron_pulse.planner.plan_file.plan_file import PlanFile, to_record

FORMAT = "megatron_pulse verification 1"
EQUAL, ROUNDING, DIFFERS = RESULTS = ("equal to the bit", "equal to rounding", "differs")
_Result = Annotated[str, OneOf(RESULTS)]
_Figure = Annotated[float, Ge(0)]
_NOT_RUN = ("profile", "predicted", "provenance", "times", "policies", "encoders", "before_step")
"""Keys of a plan that do not affect execution: costs, figures, their origin, and encoders."""


class VerificationError(UserError):
    """A certificate that cannot be read, or that belongs to another plan."""


@dataclass(frozen=True)
class Allowance:
    """A documented reason for differences in rounding of gradients.

    ``bound`` is the largest difference relative to the layer's largest gradient. ``layers`` are the
    affected layers (None: all). With ``forward`` losses may differ too.
    """

    reason: Text
    bound: Annotated[float, Gt(0)]
    layers: Annotated[Some[Text] | None, "names of layers, or null"] = None
    forward: bool = False


@dataclass(frozen=True)
class LayerResult:
    """Comparison of a layer's gradients and weights: the worst of all steps, ranks, parameters.

    ``relative`` is relative to the layer's largest gradient. Both differences are None if one is
    not finite.
    """

    layer: Text
    parameters: Natural
    result: _Result
    absolute: _Figure | None = 0.0
    relative: _Figure | None = 0.0
    ulp: Natural = 0


@dataclass(frozen=True)
class Difference:
    """The first difference that is not allowed: in ``what``, at a step (from 1), on a rank.

    ``microbatch`` is the first microbatch that differs by itself, counted over all replicas. It is
    None if no single one differs, or if the search was not run. ``ratio`` is the ratio of the
    norms.
    """

    what: Text
    step: Natural
    rank: Natural
    layer: Text | None = None
    parameter: Text | None = None
    microbatch: Natural | None = None
    absolute: _Figure | None = 0.0
    relative: _Figure | None = 0.0
    ulp: Natural | None = None
    ratio: _Figure | None = None

    def __str__(self) -> str:
        where = f" of layer {self.layer}" if self.layer else ""
        where += f" ({self.parameter})" if self.parameter else ""
        where += f", microbatch {self.microbatch}" if self.microbatch is not None else ""
        ulp = "" if self.ulp is None else f", {self.ulp:,} ulp"
        if self.absolute is None or self.relative is None:
            apart = "it is not finite"
        else:
            apart = f"off by {self.absolute:.3g} ({self.relative:.3g} of the largest{ulp})"
        if self.ratio is not None:
            apart += f"; its norm is {self.ratio:.5g} times the one process's"
        return f"{self.what}{where}, step {self.step}, rank {self.rank}: {apart}"


@dataclass(frozen=True)
class Verification:
    """Setup and result of a verification.

    ``plan`` is the digest of the plan's executed part. ``layers`` are in chain order. ``allowed``
    lists permitted differences in rounding, ``cautions`` lists parts that were not compared.
    """

    plan: Text
    backbone: Mapping[str, Any]
    layout: Text
    dtype: Text
    device: Text
    seed: Natural
    steps: Count
    microbatches: Count
    data: Text
    by_stages: bool
    versions: Mapping[str, Text]
    seconds: _Figure
    result: _Result
    layers: tuple[LayerResult, ...]
    allowed: tuple[Allowance, ...] = ()
    first: Difference | None = None
    conditioning: Text = "auto"
    cautions: tuple[Text, ...] = ()

    def lines(self) -> list[str]:
        """Lines of the certificate for terminal output."""
        count = sum(layer.result == EQUAL for layer in self.layers)
        reference = "stage after stage in one process" if self.by_stages else "one process"
        lines = [
            f"{self.result}: {name_of(self.backbone)}, {self.layout}, against {reference}",
            f"  {with_plural(self.steps, 'step')} of {self.microbatches} microbatch(es) of "
            f"{self.data}"
            f", {self.dtype} on {self.device}, seed {self.seed}, "
            + f"embedders {self.conditioning}, " * (self.conditioning != "auto")
            + ", ".join(f"{name} {version}" for name, version in self.versions.items()),
            f"  losses, gradients before clipping and weights after the optimizer: {count} of "
            f"{len(self.layers)} layers equal to the bit",
        ]
        rounded = [layer for layer in self.layers if layer.result == ROUNDING]
        if rounded:
            worst = max(rounded, key=lambda layer: layer.relative or 0.0)
            lines.append(
                f"  {with_plural(len(rounded), 'layer')} equal to rounding: at most "
                f"{worst.relative or 0.0:.2g} of the layer's largest gradient ({worst.layer})"
            )
        for allowance in self.allowed:
            whose = "all layers" if allowance.layers is None else ", ".join(allowance.layers)
            lines.append(f"    allowed {allowance.bound:.0e}: {allowance.reason} ({whose})")
        if self.first is not None:
            lines.append(f"  first: {self.first}")
        return lines + [f"  not compared: {caution}" for caution in self.cautions]


def digest_of(plan: PlanFile) -> str:
    """SHA-256 that is equal for plans that run alike: backbone, degrees, batch, stages,
    schedule."""
    runs = {key: value for key, value in to_record(plan).items() if key not in _NOT_RUN}
    if plan.shapes:
        runs["shapes"] = [digest_of(shape.plan) for shape in plan.shapes]
    text = json.dumps(runs, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def certificate_path(plan: Path) -> Path:
    """Default path of the certificate of a plan's file."""
    return plan.with_suffix(".verified.json")


def save_verification(verification: Verification, path: Path) -> None:
    """Write ``verification`` atomically: only a complete file replaces an existing one."""
    write_with_checksum(path, json.dumps(to_json(verification), indent=1) + "\n")


def versions() -> dict[str, str]:
    """Versions of the installed distributions that determine the results."""
    found = {}
    for name in ("torch", "megatron-core", "megatron-pulse"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def other_versions(verification: Verification) -> list[str]:
    """Differences between the certificate's versions and the installed ones."""
    here = versions()
    return [
        f"{name} {version}, here is {here.get(name, 'none')}"
        for name, version in verification.versions.items()
        if here.get(name) != version
    ]


def to_json(verification: Verification) -> dict[str, Any]:
    """JSON object of ``verification``."""
    return {"format": FORMAT, **asdict(verification)}


def load_verification(path: Path) -> Verification:
    """Read a certificate. Raises VerificationError."""
    try:
        found = read_json(path, FileKind.VERIFICATION)
    except FileError as error:
        raise VerificationError(str(error)) from error
    if (form := found.pop("format", None)) != FORMAT:
        raise VerificationError(
            f"{path} is {str(form)[:40]!r}, and only {FORMAT!r} is read: verify the plan anew"
        )
    try:
        return validated(Verification, found, complete=True)
    except Faults as error:
        raise VerificationError(format_faults(f"{path} is no certificate", error.faults)) from error
