"""Plans beside one process: equal where they are, and every fault found where it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_pulse.integration.verify.job import TensorShard
from megatron_pulse.integration.verify.tolerances import distance
from megatron_pulse.integration.verify.verify import Settings, verify
from megatron_pulse.planner.layout.routes import Payload
from megatron_pulse.planner.plan_file.certificate import (
    DIFFERS,
    EQUAL,
    ROUNDING,
    Difference,
    Verification,
    VerificationError,
    digest_of,
    load_verification,
    save_verification,
)
from megatron_pulse.planner.plan_file.plan_file import PlanFile, save_plan
from megatron_pulse.planner.tune.config import Recompute
from model_specs import allow, load_backbone
from tests.integration.verified import MODULE, RanksThatStay, plan_for
from tests.runtime.tiny import backbone

FAMILY = "unet-text"


@contextmanager
def broken(fault: str) -> Iterator[None]:
    """Within, the runtime of this rank has a ``fault``."""
    from megatron.core.distributed import DistributedDataParallel

    from megatron_pulse.integration.loop import forward_backward
    from megatron_pulse.runtime.executor import Executor
    from megatron_pulse.runtime.p2p.tensor_router import TensorRouter
    from megatron_pulse.runtime.parameters import replicated_embedders

    patch = pytest.MonkeyPatch()
    deliver, field, hand = (
        TensorRouter.deliver_gradients,
        Executor._field,
        replicated_embedders._backward,
    )

    def scaled(self: Any, op: Any, gradients: Any) -> None:
        twice = {key: 2 * g if op.stage == 1 else g for key, g in gradients.items()}
        deliver(self, op, twice)

    def dropped(self: Any, op: Any, gradients: Any) -> None:
        kept = {
            key: 0 * g if key[0] is Payload.SKIP and op.microbatch == 1 else g
            for key, g in gradients.items()
        }
        deliver(self, op, kept)

    def swapped(self: Any, microbatch: int, name: str, spec: Any) -> Any:
        if name == "timesteps" and microbatch == 1:
            return self._cast(torch.flip(self._batches[1][name], (0,)) + 1, spec)
        return field(self, microbatch, name, spec)

    def doubled(parameters: Any, gradients: Any) -> None:
        hand(parameters, [2 * gradient for gradient in gradients])

    def unscaled(*args: Any, **kwargs: Any) -> Any:
        settings = settings_of(*args, **kwargs)
        return replace(settings, grad_scale=lambda loss: loss * 1.001)

    settings_of = forward_backward.RunSettings
    refresh, refreshed = replicated_embedders.Replicas.refresh, list[int]()

    def once(self: Any) -> None:
        if not refreshed:
            refresh(self)
        refreshed.append(1)

    finish = DistributedDataParallel.finish_grad_sync

    def summed(self: Any, **how: Any) -> None:
        finish(self, **how)
        self.scale_gradients(2.0)

    match fault:
        case "a stage's gradient scaled":
            patch.setattr(TensorRouter, "deliver_gradients", scaled)
        case "a skip's gradient dropped":
            patch.setattr(TensorRouter, "deliver_gradients", dropped)
        case "another microbatch's field":
            patch.setattr(Executor, "_field", swapped)
        case "an embedder doubled":
            patch.setattr(replicated_embedders, "_backward", doubled)
        case "the loss scaled":
            patch.setattr(forward_backward, "RunSettings", unscaled)
        case "replicas summed, not averaged":
            patch.setattr(DistributedDataParallel, "finish_grad_sync", summed)
        case "copies not refreshed":
            patch.setattr(replicated_embedders.Replicas, "refresh", once)
    with patch.context():
        try:
            yield
        finally:
            patch.undo()


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PlanFile]:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    made = plan_for(backbone(FAMILY), "sequential", recompute=Recompute.ALWAYS)
    save_plan(made, path)
    return path, made


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RanksThatStay]:
    staying = RanksThatStay(tmp_path_factory.mktemp("ranks"), 2, broken)
    yield staying
    staying.close()


def verified(
    plan: tuple[Path, PlanFile], ranks: RanksThatStay, fault: str = "", **settings: Any
) -> Verification:
    ranks.fault = fault
    how = {"dtype": "float32", "device": "cpu", "timeout_s": 120.0, **settings}
    record = plan[1].backbone
    return verify(plan[0], Settings(record["name"], record["options"], **how), run_layout=ranks)


def test_a_sound_plan_is_equal_to_the_bit_whole_and_by_stages(
    plan: tuple[Path, PlanFile], ranks: RanksThatStay
) -> None:
    whole = verified(plan, ranks, data=None)
    assert (whole.result, whole.first) == (EQUAL, None), whole.lines()
    assert {layer.result for layer in whole.layers} == {EQUAL}
    trained = [layer.name for layer in backbone(FAMILY).layers]
    assert [row.layer for row in whole.layers if row.layer in trained] == [
        name for name in trained if name in {row.layer for row in whole.layers}
    ]
    assert whole.plan == digest_of(plan[1]) and whole.microbatches == 3
    parts = verified(plan, ranks, by_stages=True, dtype="bfloat16", conditioning="send")
    assert parts.result == EQUAL and parts.layers == whole.layers, parts.lines()


def test_replicated_embedders_are_equal_to_rounding_and_no_other_layer(
    plan: tuple[Path, PlanFile], ranks: RanksThatStay
) -> None:
    found = verified(plan, ranks, conditioning="replicate")
    assert found.result in (ROUNDING, EQUAL) and found.first is None, found.lines()
    (allowed,) = found.allowed
    assert allowed.bound == 1e-6 and allowed.layers
    apart = {row.layer for row in found.layers if row.result != EQUAL}
    assert apart <= set(allowed.layers)


def test_a_module_of_ones_own_is_equal_to_the_bit(ranks: RanksThatStay, tmp_path: Path) -> None:
    name = f"{tmp_path}/mine.py:build"
    (tmp_path / "mine.py").write_text(MODULE)
    allow(name)
    own = load_backbone(name, {"dtype": "float32"})
    plan = (
        tmp_path / "plan.json",
        plan_for(own, "sequential", split=True, recompute=Recompute.SELECTIVE),
    )
    save_plan(plan[1], plan[0])
    found = verified(plan, ranks, by_stages=True, data="digits8", conditioning="send")
    assert (found.result, found.data) == (EQUAL, "digits8"), found.lines()


def test_every_fault_is_found_where_it_is(
    plan: tuple[Path, PlanFile], ranks: RanksThatStay
) -> None:
    chain = backbone(FAMILY)
    names = [layer.name for layer in chain.layers]
    home = plan[1].partition.stage_of_layer
    crossing = [s.source for s in chain.skips if home(s.source) != home(s.destination)]
    has = {row.layer for row in verified(plan, ranks, steps=1).layers}

    def first(fault: str, **settings: Any) -> Difference:
        found = verified(plan, ranks, fault, **settings)
        assert found.result == DIFFERS and found.first is not None, (fault, found.lines())
        return found.first

    def last_with_parameters(until: int) -> str:
        return [name for name in names[: until + 1] if name in has][-1]

    found = first("a stage's gradient scaled")
    assert found.layer == last_with_parameters(len(plan[1].stages[0]) - 1), found
    assert (found.what, found.step, found.microbatch) == ("the gradient", 1, 0)

    found = first("a skip's gradient dropped")
    assert found.layer == last_with_parameters(max(crossing)), found
    assert (found.what, found.microbatch) == ("the gradient", 1)

    found = first("another microbatch's field")
    users = [i for i, layer in enumerate(chain.layers) if "timesteps" in layer.uses]
    assert (found.what, found.layer) == ("the norm of the output", names[users[0]]), found
    assert found.microbatch == 1

    found = first("an embedder doubled", conditioning="replicate")
    embedders = {layer.name for layer in chain.layers if layer.embedder}
    assert found.what == "the gradient" and found.layer in embedders, found
    assert found.ratio == pytest.approx(2, rel=1e-5) and "2 times" in str(found)

    found = first("the loss scaled")
    assert found.layer == last_with_parameters(len(names) - 1), found
    assert (found.microbatch, found.relative) == (0, pytest.approx(1e-3, rel=1e-2)), found

    found = first("copies not refreshed", conditioning="replicate")
    assert (found.what, found.step) == ("the norm of the output", 2), found


@pytest.mark.parametrize(
    ("degrees", "bound", "reason"),
    [
        ({"data": 2}, 1e-6, "2 replicas"),
        ({"tensor": 2}, 1e-5, "2 tensor-parallel ranks"),
        ({"tensor": 2, "sequence_parallel": True}, 1e-5, "2 tensor-parallel ranks"),
    ],
    ids=["data", "tensor", "sequence"],
)
def test_replicas_and_divided_layers_are_equal_to_rounding(
    degrees: dict[str, Any], bound: float, reason: str, ranks: RanksThatStay, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json", plan_for(backbone("uvit"), pipeline=1, **degrees)
    save_plan(plan[1], plan[0])
    found = verified(plan, ranks)
    assert (found.result, found.first) == (ROUNDING, None), found.lines()
    (allowed,) = found.allowed
    assert allowed.bound == bound and reason in allowed.reason
    assert 0 < max(row.relative or 0.0 for row in found.layers) <= bound
    if "data" in degrees:
        wrong = verified(plan, ranks, "replicas summed, not averaged").first
        assert wrong is not None and wrong.what == "the gradient" and wrong.layer == "head"
        assert wrong.relative is not None and wrong.relative > 1e-2 and wrong.microbatch == 0


def test_shares_of_strided_weights_are_what_ranks_have() -> None:
    whole = torch.arange(8.0)
    assert TensorShard(0, 1, 1, 2).of(whole).tolist() == [4, 5, 6, 7]
    assert TensorShard(0, 2, 1, 2).of(whole).tolist() == [2, 3, 6, 7]
    assert TensorShard(0, 2, 1, 2).whole((4,)) == (8,)


def test_distances_are_absolute_relative_and_in_units_of_the_last_place() -> None:
    one = torch.tensor([1.0, -1.0])
    above = torch.nextafter(one, torch.tensor([2.0, 2.0]))
    found = distance(above, one, 2.0)
    assert found.ulp == 1 and found.absolute == pytest.approx(2**-23)
    assert found.relative == found.absolute / 2
    assert distance(torch.tensor([-0.0]), torch.tensor([0.0]), 1.0).ulp == 0
    assert distance(torch.tensor([torch.nan]), one[:1], 1.0).absolute == float("inf")


def test_a_certificate_is_read_as_it_was_written_or_refused(
    plan: tuple[Path, PlanFile], tmp_path: Path
) -> None:
    digest = digest_of(plan[1])
    assert digest_of(replace(plan[1], provenance={})) == digest
    assert digest_of(replace(plan[1], grad_reduce_in_bf16=True)) != digest
    path = tmp_path / "plan.verified.json"
    found = Difference("the gradient", 1, 0, "a", "a.weight", 2, None, None, 5)
    made = Verification(
        digest, {"name": "x"}, "1 rank(s)", "float32", "CPU", 0, 2, 3, "random numbers", False,
        {"torch": "0"}, 1.0, DIFFERS, (), (), found,
    )  # fmt: skip
    save_verification(made, path)
    assert load_verification(path) == made
    assert "layer a (a.weight), microbatch 2, step 1, rank 0: it is not finite" in made.lines()[-1]
    text = path.read_text().split("\n")
    path.write_text("\n".join([text[0], *text[2:]]).replace('"seed": 0', '"seed": "no"'))
    with pytest.raises(VerificationError, match="seed is 'no'"):
        load_verification(path)
