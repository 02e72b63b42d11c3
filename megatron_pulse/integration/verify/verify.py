"""Verification of a plan: its layout and one process on the same microbatches, compared."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.errors import UserError
from megatron_pulse.integration.verify.job import (
    Pass,
    TensorShard,
    VerifyJob,
    deterministic,
    planned,
    read_plan_of,
    write_batches,
)
from megatron_pulse.integration.verify.launcher import run_ranks
from megatron_pulse.integration.verify.layout_rank import place_file, result_file
from megatron_pulse.integration.verify.reference import PassResult, Reference, weights_file
from megatron_pulse.integration.verify.tolerances import (
    Distance,
    allowances,
    bound_of,
    distance,
    largest,
    weights_within,
)
from megatron_pulse.planner.layout.embedder_choice import Policy
from megatron_pulse.planner.plan_file.certificate import (
    DIFFERS,
    EQUAL,
    ROUNDING,
    Allowance,
    Difference,
    LayerResult,
    Verification,
    digest_of,
    versions,
)
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.profile.measurement.machine import computing_with, device_name

type RunLayout = Callable[[VerifyJob, PlanFile, float, Callable[[int], None]], None]
"""Runs a job's passes on the plan's ranks, within a deadline (see ``run_ranks``)."""
type Progress = Callable[[str, int, int], None]
"""Callback for progress: activity, amount done, total amount."""


@dataclass(frozen=True)
class Settings:
    """Settings of a verification: ``data`` as --pulse-data names it, or random numbers."""

    backbone: str
    options: Mapping[str, Any]
    dtype: str
    device: str
    data: str | None = None
    steps: int = 2
    seed: int = 0
    timeout_s: float = 600.0
    by_stages: bool = False
    conditioning: Policy = "auto"


def verify(
    plan: Path,
    settings: Settings,
    progress: Progress = lambda what, done, count: None,
    run_layout: RunLayout = run_ranks,
) -> Verification:
    """Compare losses, gradients and weights of the plan's layout with those of one process.

    Raises UserError for a faulty plan, backbone or data. Also raised if the layout cannot make a
    step, or if the time limit is reached.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pulse-verify-") as folder:
        steps = tuple(Pass(step) for step in range(settings.steps))
        job = VerifyJob(
            str(plan.resolve()),
            settings.backbone,
            dict(settings.options),
            settings.dtype,
            settings.device,
            settings.seed,
            settings.timeout_s,
            folder,
            steps,
            settings.conditioning,
        )
        given, backbone = read_plan_of(job)
        if given.fsdp is not None:
            raise UserError(
                f"{plan}: 'pulse verify' compares whole gradients, and FSDP shards them. Verify a "
                "pipeline of this model ('pulse tune --no-fsdp')"
            )
        if given.context > 1:
            raise UserError(
                f"{plan}: 'pulse verify' compares whole samples, and {given.context} ranks share "
                "their tokens. Verify a plan without context parallelism ('pulse tune "
                "--context-parallel 1')"
            )
        if (num_steps := max(settings.steps, len(given.shapes))) > settings.steps:
            job = replace(job, passes=tuple(Pass(step) for step in range(num_steps)))
        laid = planned(job, given, backbone)
        allowed = allowances(given, laid, job.torch_dtype)
        job = replace(job, resync=bool(allowed))
        write_batches(job, given, backbone, settings.data)
        verifier = _Verifier(job, given, backbone, settings, allowed, begin, progress, run_layout)
        layers, first = verifier.run()
        place = torch.device(settings.device)
        return Verification(
            plan=digest_of(given),
            backbone=dict(backbone.record),
            layout=given.heading.split(" on ", 1)[1],
            dtype=settings.dtype,
            device=device_name(place),
            seed=settings.seed,
            steps=num_steps,
            microbatches=len(job.batches(0)),
            data=settings.data or "random numbers",
            by_stages=settings.by_stages,
            versions=versions(),
            seconds=round(time.monotonic() - begin, 1),
            result=_result(layers, first),
            layers=tuple(layers),
            allowed=tuple(allowed),
            first=first,
            conditioning=settings.conditioning,
            cautions=tuple(_cautions(given)),
        )


def _result(layers: Sequence[LayerResult], first: Difference | None) -> str:
    if first is not None:
        return DIFFERS
    return ROUNDING if any(layer.result == ROUNDING for layer in layers) else EQUAL


def _cautions(given: PlanFile) -> Iterator[str]:
    if given.schedule.bubble_tasks:
        yield "encoders in pipeline bubbles: the schedule runs without them"
    if given.self_conditioning:
        yield "the first pass of a self-conditioning step"
    if given.dpo:
        yield "the pass of the reference of dpo"
    if given.distributed_optimizer:
        yield (
            "the distributed optimizer: gradients are all-reduced, and each rank updates all "
            "weights"
        )
    if given.optimizer_cpu_offload:
        yield "optimizer offload: weights are updated on the device"


@dataclass(frozen=True)
class _Compared:
    """Results of one pass: the reference's, those of all ranks, and each layer's largest gradient.

    ``step`` counts from 1.
    """

    step: int
    expected: PassResult
    found: Sequence[PassResult]
    scales: Mapping[str, float]


class _Verifier:
    """One verification: reference, layout, comparison, and the search for the microbatch."""

    def __init__(
        self,
        job: VerifyJob,
        given: PlanFile,
        backbone: Backbone,
        settings: Settings,
        allowed: list[Allowance],
        begin: float,
        progress: Progress,
        run_layout: RunLayout,
    ) -> None:
        self._job, self._given, self._backbone = job, given, backbone
        self._allowed, self._progress, self._run_layout = allowed, progress, run_layout
        self._deadline = begin + settings.timeout_s
        self._done = 0
        self._reference = Reference(
            job, given, backbone, settings.by_stages, self._deadline, self._advance
        )
        self._order = {layer.name: i for i, layer in enumerate(backbone.layers)}
        self._folder = Path(job.folder)
        self._rows: dict[str, LayerResult] = {}

    def run(self) -> tuple[list[LayerResult], Difference | None]:
        """Result of every trained layer, and the first difference."""
        self._run_reference(self._job.passes, "reference")
        self._layout(self._job)
        first = self._compare()
        if first is not None and first.what == _GRADIENT:
            first = self._localised(first)
        return sorted(self._rows.values(), key=lambda row: self._order[row.layer]), first

    def _advance(self) -> None:
        self._done += 1
        self._progress("one process", self._done, self._count)

    def _run_reference(self, passes: Sequence[Pass], prefix: str) -> None:
        stages = len(self._reference.stages)
        counts = [len(self._job.batches(p.step)) if p.only is None else 1 for p in passes]
        self._count = stages * sum(counts)
        self._done = 0
        with computing_with(1), deterministic():
            for number, made in enumerate(passes):
                self._reference.run(made, f"{prefix}_{number}")

    def _layout(self, job: VerifyJob) -> None:
        count = len(job.passes)
        self._run_layout(
            job, self._given, self._deadline, lambda done: self._progress("layout", done, count)
        )

    # --- comparison ---------------------------------------------------------------------------

    def _compare(self) -> Difference | None:
        """Fill the rows of all layers; return the first difference beyond the allowed ones."""
        layer_of = self._reference.layer_of
        for layer in layer_of.values():
            row = self._rows.setdefault(layer, LayerResult(layer, 0, EQUAL))
            self._rows[layer] = replace(row, parameters=row.parameters + 1)
        ranks = range(self._given.world_size)
        places = [torch.load(place_file(self._folder, rank), mmap=True) for rank in ranks]
        self._shares = list(map(_shares_of, places))
        first = self._first_weights(places)
        for number, made in enumerate(self._job.passes):
            step, expected = made.step + 1, self._expected("reference", number)
            found = [PassResult.load(result_file(self._folder, rank, number)) for rank in ranks]
            compared = _Compared(step, expected, found, largest(expected.gradients, layer_of))
            candidates = [
                self._outputs(compared),
                self._losses(compared),
                self._gradients(compared),
                self._weights(compared, self._reference_weights(step, "second")),
            ]
            first = first or next((c for c in candidates if c is not None), None)
        return first

    def _expected(self, prefix: str, number: int) -> PassResult:
        """Results of the reference's pass, of all its stages."""
        whole = PassResult()
        for stage in self._reference.stages:
            part = PassResult.load(self._folder / f"{prefix}_{number}_{stage}.pt")
            for kind, values in vars(part).items():
                getattr(whole, kind).update(values)
        return whole

    def _reference_weights(self, step: int, *kinds: str) -> dict[str, Tensor]:
        """Tensors of some kinds (``AdamWeights``) after ``step``, of all stages."""
        found: dict[str, Tensor] = {}
        for stage in self._reference.stages:
            record = torch.load(weights_file(self._folder, stage, step), mmap=True)
            for kind in kinds:
                found |= record[kind]
        return found

    def _first_weights(self, places: Sequence[Any]) -> Difference | None:
        expected = self._reference_weights(0, "main", "frozen")
        for rank, place in enumerate(places):
            for name in sorted(place["weights"]):
                mine, theirs = place["weights"][name], _part(expected, self._shares[rank], name)
                if not torch.equal(mine, theirs):
                    apart = distance(mine, theirs, _most(theirs))
                    layer = self._reference.layer_of.get(name)
                    return _difference("initial weight", 0, rank, layer, name, apart)
        return None

    def _outputs(self, of: _Compared) -> Difference | None:
        """First layer whose output differs, in chain order, with its first microbatch."""
        if self._given.tensor > 1:
            return None
        keys = sorted(of.expected.outputs, key=lambda key: (self._order[key[0]], key[1]))
        for key in keys:
            digest, norm = of.expected.outputs[key]
            for rank, own in enumerate(of.found):
                mine = own.outputs.get(key)
                if mine is not None and mine[0] != digest:
                    apart = abs(mine[1] - norm)
                    return Difference(
                        "the norm of the output", of.step, rank, key[0], None, key[1],
                        *_finite(apart, apart / norm if norm else apart),
                    )  # fmt: skip
        return None

    def _losses(self, of: _Compared) -> Difference | None:
        bound = max((a.bound for a in self._allowed if a.forward), default=0.0)
        seen = set[int]()
        for number, theirs in sorted(of.expected.losses.items()):
            for rank, own in enumerate(of.found):
                if number not in own.losses:
                    continue
                seen.add(number)
                apart = distance(own.losses[number], theirs, float(theirs.abs()))
                if apart.absolute and not apart.relative <= bound:
                    return _difference("the loss", of.step, rank, None, None, apart, number)
            if number not in seen:
                return Difference("a loss that no rank has", of.step, 0, microbatch=number)
        return None

    def _gradients(self, of: _Compared) -> Difference | None:
        """Parameter with the largest difference, in the first layer in backward order."""
        layer_of, first = self._reference.layer_of, None
        most = -1.0
        for name in sorted(of.expected.gradients, key=lambda name: -self._order[layer_of[name]]):
            layer = layer_of[name]
            held = [rank for rank, own in enumerate(of.found) if name in own.gradients]
            if len(held) < self._given.data * self._given.tensor:
                first = first or Difference("a gradient that no rank has", of.step, 0, layer, name)
            for rank in held:
                mine = of.found[rank].gradients[name]
                theirs = _part(of.expected.gradients, self._shares[rank], name)
                if torch.equal(mine, theirs):
                    continue
                apart = distance(mine, theirs, of.scales[layer])
                fits = apart.relative <= bound_of(self._allowed, layer)
                self._note(layer, ROUNDING if fits else DIFFERS, apart)
                if fits or not (first is None or (first.layer == layer and apart.absolute > most)):
                    continue
                most = apart.absolute
                first = _difference(_GRADIENT, of.step, rank, layer, name, apart)
                first = replace(first, ratio=_ratio(mine, theirs))
        return first

    def _weights(self, of: _Compared, squares: Mapping[str, Tensor]) -> Difference | None:
        """First weight that differs after the optimizer's step, in chain order."""
        layer_of, first = self._reference.layer_of, None
        for name, whole in of.expected.weights.items():
            layer = layer_of[name]
            slack = bound_of(self._allowed, layer) * of.scales[layer] / self._job.loss_scale
            for rank, own in enumerate(of.found):
                if name not in own.weights:
                    continue
                shares = self._shares[rank]
                mine, theirs = own.weights[name], _part(of.expected.weights, shares, name)
                if torch.equal(mine, theirs):
                    continue
                square = _part(squares, shares, name)
                fits = slack > 0 and weights_within(mine, theirs, square, slack)
                apart = distance(mine, theirs, _most(whole))
                if not fits:
                    self._note(layer, DIFFERS, apart)
                    first = first or _difference("the weight", of.step, rank, layer, name, apart)
                elif self._rows[layer].result == EQUAL:
                    self._rows[layer] = replace(self._rows[layer], result=ROUNDING)
        return first

    def _note(self, layer: str, result: str, apart: Distance) -> None:
        row = self._rows[layer]
        if row.result == DIFFERS and result != DIFFERS:
            return
        most = math.inf if row.relative is None else row.relative
        if row.result != result or apart.relative > most:
            absolute, relative = _finite(apart.absolute, apart.relative)
            self._rows[layer] = replace(
                row, result=result, absolute=absolute, relative=relative, ulp=apart.ulp
            )

    # --- the microbatch -----------------------------------------------------------------------

    def _localised(self, first: Difference) -> Difference:
        """``first`` with the first microbatch whose own gradient differs.

        The step is repeated in the same schedule, with the loss of one microbatch after the other.
        """
        step, name = first.step - 1, first.parameter
        assert name is not None and first.layer is not None
        count = len(self._job.batches(step))
        alone = tuple(Pass(step, number, updates=False) for number in range(count))
        before = tuple(Pass(earlier) for earlier in range(step))
        layer_of = self._reference.layer_of
        names = tuple(other for other, layer in layer_of.items() if layer == first.layer)
        job = replace(self._job, passes=(*before, *alone), names=names)
        self._reference.keep_only(names)
        self._run_reference(alone, "alone")
        self._layout(job)
        shares = _shares_of(torch.load(place_file(self._folder, first.rank), mmap=True))
        bound = bound_of(self._allowed, first.layer)
        for number in range(count):
            expected = self._expected("alone", number).gradients
            scale = max(map(_most, expected.values()))
            theirs = _part(expected, shares, name)
            path = result_file(self._folder, first.rank, step + number)
            mine = PassResult.load(path).gradients[name]
            if not torch.equal(mine, theirs):
                if not distance(mine, theirs, scale).relative <= bound:
                    return replace(first, microbatch=number)
        return first


_GRADIENT = "the gradient"


def _shares_of(place: Mapping[str, Any]) -> dict[str, TensorShard]:
    return {name: TensorShard(*share) for name, share in place["place"]["shares"].items()}


def _part(values: Mapping[str, Tensor], shares: Mapping[str, TensorShard], name: str) -> Tensor:
    return shares[name].of(values[name]) if name in shares else values[name]


def _most(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _ratio(mine: Tensor, theirs: Tensor) -> float | None:
    """Norm of ``mine`` over that of ``theirs``; None if the ratio is not finite."""
    norm = float(theirs.double().norm())
    ratio = float(mine.double().norm()) / norm if norm else math.inf
    return ratio if math.isfinite(ratio) else None


def _finite(absolute: float, relative: float) -> tuple[float | None, float | None]:
    """Values for a JSON file, which holds no non-finite numbers: None for those."""
    found = math.isfinite(absolute) and math.isfinite(relative)
    return (absolute, relative) if found else (None, None)


def _difference(
    what: str,
    step: int,
    rank: int,
    layer: str | None,
    parameter: str | None,
    apart: Distance,
    microbatch: int | None = None,
) -> Difference:
    absolute, relative = _finite(apart.absolute, apart.relative)
    return Difference(what, step, rank, layer, parameter, microbatch, absolute, relative, apart.ulp)
