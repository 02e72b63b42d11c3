"""Diffusion-DPO: a pass of the reference and the step after it, beside peft and plain torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

import megatron_pulse as pulse
import model_specs
from megatron_pulse.adapters.adapter import ATTENTION, Adapter
from megatron_pulse.adapters.low_rank import adapters_disabled
from megatron_pulse.backbone.build_context import LayerContext
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.published_weights import to_published
from megatron_pulse.diffusion.loss import LossChoice
from megatron_pulse.diffusion.preference import PreferenceLoss
from megatron_pulse.profile.trainable import TrainedPart
from megatron_pulse.runtime.parameters.reference_weights import ReferenceWeights
from megatron_pulse.runtime.pipeline import Pipeline
from model_specs.common.attach_adapter import adapter_names, with_adapter
from tests.model_specs.twins import Twin
from tests.ranks import run_ranks
from tests.runtime.equality import (
    SEED,
    Case,
    differences,
    join_pipeline,
    leave_zero,
    make_batches,
    plan_of,
    split,
)
from tests.runtime.test_adapters import of_transformer, transformer

ADAPTER = Adapter(3, 6.0)
PEFT = LoraConfig(r=3, lora_alpha=6, target_modules=list(ATTENTION))
BETA = 5000.0
FOLD = Case("fold", 2, micro_batch_size=4)
CASES: list[tuple[Case, int | None]] = [
    (replace(FOLD, placement="sequential", recompute=2), None),
    (replace(FOLD, placement="interleaved", selective=1), None),
    (FOLD, 1),  # with the number of backwards after which a weight gradient follows
]


@dataclass
class Step:
    """Parameters before a step; losses, implicit accuracies and gradients of the step."""

    before: dict[str, Tensor]
    losses: list[float]
    accuracies: list[float]
    gradients: dict[str, Tensor]


def traced(dtype: torch.dtype = torch.float64) -> Backbone:
    given = {n: x if n == "timestep" else x.to(dtype) for n, x in of_transformer().items()}
    return with_adapter(pulse.from_module(transformer().to(dtype), given), ADAPTER)


def family(dtype: torch.dtype = torch.float64) -> Backbone:
    part = TrainedPart(adapter=ADAPTER.to_record())
    return model_specs.trained_as(model_specs.load_backbone("sd3-tiny"), part)


CHAINS = {"traced": traced, "family": family}


def errors(prediction: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return LossChoice(loss="dpo").errors(prediction, batch["target"].to(prediction))


def step_of(backbone: Backbone, case: Case, config: Any, group: Any, zero_b: bool = False) -> Step:
    """A step of the pipeline after the pass of its reference."""
    preference, in_reference = PreferenceLoss(errors, BETA), [False]

    def loss(prediction: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return (preference.keep if in_reference[0] else preference)(prediction, batch)

    pipeline = Pipeline(
        plan_of(backbone, case, group.size() if group is not None else 1),
        loss,
        case.micro_batch_size,
        seed=SEED,
        dtype=getattr(torch, case.dtype),
        group=group,
        context=None if config is None else LayerContext(config),
    )
    if not zero_b:
        leave_zero(pipeline)
    before = {n: p.detach().clone() for n, p in pipeline.named_parameters()}
    batches = make_batches(backbone, case, 0)
    preference.begin()
    with adapters_disabled():
        in_reference[0] = True
        pipeline.evaluate(batches)
    in_reference[0] = False
    losses = [each.item() for each in pipeline.step(batches)]
    gradients = {n: p.grad for n, p in pipeline.named_parameters() if p.grad is not None}
    return Step(before, losses, [a.item() for a in preference.accuracies()], gradients)


def run_cases(chain: str, cases: list[tuple[Case, int | None]], zero_b: bool) -> list[Step]:
    torch.set_num_threads(1)
    config, group = join_pipeline()
    backbone, found = CHAINS[chain](getattr(torch, cases[0][0].dtype)), []
    for case, delay in cases:
        if delay is not None:
            schedule = plan_of(backbone, case, 2).step(case.num_microbatches).schedule
            case = replace(case, schedule=split(schedule, delay))
        found.append(step_of(backbone, case, config, group, zero_b))
    dist.barrier()
    return found


def by_peft(chain: str, before: Mapping[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients of peft's module by the formula of diffusers' script."""
    backbone = CHAINS[chain]()
    twin = None
    if chain == "family":
        twin = Twin(backbone, torch.float64)
        names = adapter_names(backbone)
        base = {name: tensor for name, tensor in before.items() if name not in names}
        state = to_published(twin.published, base)
        module = twin.module
    else:
        names = {name: name for name in before if ".lora_" in name}
        state = {name: tensor for name, tensor in before.items() if name not in names}
        module = transformer().double()
    module.load_state_dict(state, strict=False)
    module = inject_adapter_in_model(PEFT, module)
    factors = {n.replace(".default.", "."): p for n, p in module.named_parameters() if "lora_" in n}
    assert factors.keys() == {*names.values()}
    for name, theirs in names.items():
        factors[theirs].data.copy_(before[name])
    case = FOLD
    losses = []
    left_out = ("noisy", "target", "positions")
    for batch in make_batches(backbone, case, 0):
        target = batch["target"]

        def of(batch: dict[str, Tensor], target: Tensor = target) -> tuple[Tensor, Tensor]:
            fields = {n: x.double() for n, x in batch.items() if n not in left_out}
            if twin is not None:
                prediction = twin(batch["noisy"], fields)
            else:
                fields["timestep"] = fields.pop("timesteps")
                prediction = module(hidden_states=batch["noisy"], **fields).sample
            own = F.mse_loss(prediction, target, reduction="none").mean((1, 2, 3))
            return own[0::2], own[1::2]

        model_w, model_l = of(batch)
        switch(module, False)
        with torch.no_grad():
            ref_w, ref_l = of(batch)
        switch(module, True)
        logits = (ref_w - ref_l) - (model_w - model_l)
        loss = -1 * F.logsigmoid(BETA / 2 * logits).mean()  # the script's beta is half of ours
        (loss / case.num_microbatches).backward()
        losses.append(loss.item())
    gradients = {ours: factors[theirs].grad for ours, theirs in names.items()}
    return losses, {n: found for n, found in gradients.items() if found is not None and found.any()}


def switch(module: nn.Module, on: bool) -> None:
    for each in module.modules():
        if isinstance(each, BaseTunerLayer):
            each.enable_adapters(on)


@pytest.mark.parametrize("chain", CHAINS)
def test_a_step_is_that_of_peft_in_every_layout(chain: str) -> None:
    ((alone,),) = run_ranks(1, run_cases, chain, [(FOLD.alone, None)], False)
    losses, gradients = by_peft(chain, alone.before)
    assert alone.losses == pytest.approx(losses, rel=1e-6)  # losses are fp32
    assert all(abs(loss - math.log(2)) > 1e-3 for loss in losses)
    assert gradients and {*gradients} == {n for n, g in alone.gradients.items() if g.any()}
    for name, gradient in gradients.items():
        scale = gradient.abs().max().item()
        assert scale and (alone.gradients[name] - gradient).abs().max() < 1e-9 * scale, name
    ranks = run_ranks(2, run_cases, chain, CASES, False)
    for i, (case, _) in enumerate(CASES):
        steps = [rank[i] for rank in ranks]
        (last,) = [step for step in steps if step.losses]
        assert last.losses == alone.losses and last.accuracies == alone.accuracies, case
        together = {n: g for step in steps for n, g in step.gradients.items()}
        assert not differences(together, alone.gradients), case


@pytest.mark.parametrize("chain", CHAINS)
def test_a_new_adapter_has_the_loss_ln_2(chain: str) -> None:
    case = replace(FOLD.alone, dtype="float32")
    ((step,),) = run_ranks(1, run_cases, chain, [(case, None)], True)
    assert step.losses == pytest.approx([math.log(2)] * 2, abs=1e-6)
    assert step.accuracies == [0.5, 0.5]  # model and reference are equal to the bit


NUM_STEPS, LR = 3, 1e-2


def whole_chain() -> Backbone:
    given = {n: x if n == "timestep" else x.double() for n, x in of_transformer().items()}
    return pulse.from_module(transformer().double(), given)


def train_whole(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of all steps, where they are, and this device's weights after them."""
    torch.set_num_threads(1)
    config, group = join_pipeline()
    backbone = whole_chain()
    preference, in_reference = PreferenceLoss(errors, BETA), [False]

    def loss(prediction: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return (preference.keep if in_reference[0] else preference)(prediction, batch)

    plan = plan_of(backbone, case, 1 if group is None else group.size())
    given = dict(seed=SEED, dtype=torch.float64, group=group, context=LayerContext(config))
    pipeline = Pipeline(plan, loss, case.micro_batch_size, **given)
    reference = ReferenceWeights(pipeline.named_parameters())
    optimizer = torch.optim.SGD(pipeline.parameters(), LR, momentum=0.9)
    losses = []
    for step in range(NUM_STEPS):
        batches = make_batches(backbone, case, step)
        preference.begin()
        with reference.in_place():
            in_reference[0] = True
            pipeline.evaluate(batches)
        in_reference[0] = False
        optimizer.zero_grad()
        losses += [each.item() for each in pipeline.step(batches)]
        optimizer.step()
    dist.barrier()
    return losses, {n: p.detach().clone() for n, p in pipeline.named_parameters()}


def in_plain_torch(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """The same by a module, with a deep copy of it as the frozen reference."""
    backbone, module = whole_chain(), transformer().double()
    frozen = copy.deepcopy(module).requires_grad_(False)
    optimizer = torch.optim.SGD(module.parameters(), LR, momentum=0.9)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for batch in make_batches(backbone, case, step):
            fields = {n: x.double() for n, x in batch.items()}
            names = {"hidden_states": "noisy", "timestep": "timesteps"}
            inputs = {n: fields[names.get(n, n)] for n in of_transformer()}
            ours, theirs = (
                (model(**inputs).sample - fields["target"]).square().mean((1, 2, 3))
                for model in (module, frozen)
            )
            gain = (ours[0::2] - ours[1::2]) - (theirs[0::2] - theirs[1::2])
            loss = -F.logsigmoid(-BETA / 2 * gain).mean()
            (loss / case.num_microbatches).backward()
            losses.append(loss.item())
        optimizer.step()
    return losses, {n: p.detach() for n, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("placement", "num_devices"), [("fold", 2), ("sequential", 2), ("fold", 4), ("sequential", 4)]
)
def test_training_all_weights_is_that_of_plain_torch_with_a_frozen_copy(
    placement: str, num_devices: int
) -> None:
    losses, weights = in_plain_torch(FOLD)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(losses[-1] - math.log(2)) > 1e-3
    ((alone, whole),) = run_ranks(1, train_whole, FOLD.alone)
    assert alone == pytest.approx(losses, rel=1e-6)  # losses are fp32
    trained = {n for n, p in transformer().double().named_parameters() if (weights[n] - p).any()}
    assert trained <= whole.keys()
    for name in trained:
        scale = weights[name].abs().max().item()
        assert (whole[name] - weights[name]).abs().max() < 1e-9 * scale, name
    ranks = run_ranks(num_devices, train_whole, replace(FOLD, placement=placement))
    assert max((found for found, _ in ranks), key=len) == pytest.approx(alone, rel=1e-6)
    together = {n: p for _, own in ranks for n, p in own.items()}
    assert all(found < 1e-13 for found in differences(together, whole).values())
