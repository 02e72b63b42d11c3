"""LoRA beside the frozen weights of every family: as derived chains train it, in every layout."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import model_specs
from megatron_pulse.adapters.adapter import DEFAULT_TARGETS, Adapter
from megatron_pulse.adapters.choice import AdapterChoice
from megatron_pulse.adapters.files import write_adapter
from megatron_pulse.adapters.low_rank import A, B, M
from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from megatron_pulse.backbone.published_weights import to_published
from megatron_pulse.errors import Faults
from megatron_pulse.profile.trainable import TrainedPart
from model_specs.common.adapters import adapt
from model_specs.common.attach_adapter import adapter_names, with_adapter
from tests.model_specs.chains import Chain, build_chain, relative_error
from tests.model_specs.test_tensor_parallel import CASES as DIVIDED
from tests.model_specs.test_twins import PUBLISHED
from tests.model_specs.twins import Twin
from tests.ranks import run_ranks
from tests.runtime.equality import Case, Outcome, differences, join_pipeline, merge, plan_of, split
from tests.runtime.equality import train as train_stages
from tests.runtime.tiny import FAMILIES

EVERYTHING = Adapter(3, 6.0, ("*",))
DROPPING = replace(EVERYTHING, dropout=0.25)
EVERY: Mapping[str, tuple[str, dict[str, Any]]] = {**FAMILIES, "example": ("example-tiny", {})}
SOME = {"unet-text": Adapter(3, 6.0), "hunyuan": Adapter(3, 6.0, ("to_q", "attn2.to_v", "net.2"))}
"""Adapters beside some of the weights that projections fuse; other families have ``EVERYTHING``."""
WITH_DORA = ("sd3", "unet-text", "hunyuan")
"""Families that the fold trains with DoRA."""
FOLD = Case("fold", 2, dtype="float32", steps=1)
SAVED = "flux"
"""Case whose checkpoint is also written: some of its factors consist of several segments."""
WITH_DORA_TOO = (SAVED, "unet", "sd3")
"""Cases whose layouts are compared with DoRA too: row-parallel, convolutions, fused by heads."""
TENSOR = {**DIVIDED, "controlnet": FAMILIES["controlnet"], "example": EVERY["example"]}


def adapted(name: str, options: Mapping[str, Any], adapter: Adapter = EVERYTHING) -> Backbone:
    part = TrainedPart(adapter=adapter.to_record())
    return model_specs.trained_as(model_specs.load_backbone(name, options), part)


def perturb(chain: Chain) -> None:
    """Noise by name on every whole parameter; zeros in B would hide the gradient of A."""
    for name, parameter in chain.parameters().items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.add_((0.05 * noise).to(parameter.dtype))


def factors_of(chain: Chain) -> dict[str, nn.Parameter]:
    """Trained parameters, by published name."""
    found = {n: p for n, p in chain.parameters().items() if p.requires_grad}
    names = adapter_names(chain.backbone) or {name: name for name in found}
    assert found.keys() == names.keys()
    return {names[name]: parameter for name, parameter in found.items()}


@pytest.mark.parametrize("family", PUBLISHED)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_family_with_an_adapter_is_the_derived_chain_with_it(
    family: str, kind: str, one_rank: None
) -> None:
    """The same factors by published name, predictions and gradients of factors."""
    adapter = replace(SOME.get(family, EVERYTHING), type=kind)
    ours = build_chain(adapted(*PUBLISHED[family], adapter), torch.float64)
    perturb(ours)
    names = adapter_names(ours.backbone)
    twin = Twin(ours.backbone, torch.float64)
    state = {name: tensor for name, tensor in ours.state().items() if name not in names}
    twin.module.load_state_dict(to_published(twin.published, state))
    image, fields = ours.batch(2)
    theirs = build_chain(with_adapter(twin.derive(image, fields), adapter), torch.float64)
    mine, expected = factors_of(ours), factors_of(theirs)
    # Nothing of the prediction depends on the others.
    assert expected.keys() <= mine.keys()
    for name, parameter in expected.items():
        parameter.data.copy_(mine[name].data)
    found = ours(image, fields)
    wanted = twin.unpacked(theirs(*twin.batch(image, fields)), image)
    assert relative_error(found, wanted) < 1e-6
    factors = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    for prediction in (found, wanted):
        (prediction * factors).sum().backward()
    errors = {}
    largest = max(gradient_of(p).abs().max().item() for p in expected.values())
    for name, parameter in mine.items():
        if name not in expected:
            assert not gradient_of(parameter).any(), name
            continue
        reference = gradient_of(expected[name])
        scale = max(reference.abs().max().item(), 1e-3 * largest)
        errors[name] = (gradient_of(parameter) - reference).abs().max().item() / scale
    assert max(errors.values()) < 1e-6, errors


def gradient_of(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def run_cases(cases: list[tuple[str, Case, int | None]]) -> list[Outcome]:
    """All of them on this rank; with a number of backwards, weight gradients follow after it."""
    from megatron_pulse.integration.megatron.linear_wgrad import defer_wgrad

    torch.set_num_threads(1)
    config, group = join_pipeline()
    defer_wgrad()
    outcomes = []
    for family, case, delay in cases:
        kind = "dora" if family in WITH_DORA else "lora"
        backbone = adapted(*EVERY[family], replace(EVERYTHING, type=kind))
        if delay is not None:
            schedule = plan_of(backbone, case, 2).step(case.num_microbatches).schedule
            case = replace(case, schedule=split(schedule, delay))
        outcomes.append(train_stages(backbone, case, config, group))
    dist.barrier()
    return outcomes


def test_a_fold_of_every_family_is_bit_for_bit_one_process() -> None:
    delays = dict.fromkeys(EVERY, None) | {"flux": 1, "unet-text": 1, "hunyuan": 1}
    (alone,) = run_ranks(1, run_cases, [(family, FOLD.alone, None) for family in EVERY])
    ranks = run_ranks(2, run_cases, [(family, FOLD, delays[family]) for family in EVERY])
    for i, family in enumerate(EVERY):
        got = merge([outcomes[i] for outcomes in ranks])
        assert got.losses == alone[i].losses and len(got.losses) == 2, family
        assert not differences(got.gradients, alone[i].gradients), family
        assert not differences(got.parameters, alone[i].parameters), family
        assert got.gradients and all(name.endswith((A, B, M)) for name in got.gradients), family


def factors_after(
    backbone: Backbone, ranks: int, sequence_parallel: bool, folder: Path | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Whole factors before and after two steps of ranks; saved in ``folder``, if any."""
    from megatron.core import dist_checkpointing, parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    if sequence_parallel:
        backbone = backbone.divide_sequences(ranks)
    sizes = {"tensor_model_parallel_size": ranks, "sequence_parallel": sequence_parallel}
    chain = build_chain(backbone, torch.float64, **sizes)
    drawn = whole(chain)
    fill(chain, {name: noisy(name, tensor) for name, tensor in drawn.items()})
    before = whole(chain)
    parameters = {n: p for n, p in chain.parameters().items() if p.requires_grad}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    for step in range(2):
        image, fields = chain.batch(2, seed=step)
        optimizer.zero_grad()
        chain(image, fields).square().mean().backward()
        for parameter in parameters.values():
            if sequence_parallel and getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad)
        optimizer.step()
    after = whole(chain)
    if folder is not None:
        dist_checkpointing.save(sharded(chain), str(folder))
    parallel_state.destroy_model_parallel()
    return before, {name: tensor for name, tensor in after.items() if name in parameters}


def noisy(name: str, tensor: Tensor) -> Tensor:
    """Zeros in B would hide the gradient of A."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return tensor + 0.05 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)


def sharded(chain: Chain) -> dict[str, Any]:
    """Sharded state of the parameters, as a run's."""
    from megatron.core import parallel_state

    from megatron_pulse.integration.megatron.stage import sharded_module_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state: dict[str, Any] = {}
    for layer, module in zip(chain.backbone.layers, chain.modules, strict=True):
        own = getattr(module, "sharded_state_dict", None)
        shard = own or (lambda *given, module=module: sharded_module_state(module, *given[::2]))
        state |= shard(layer.prefix, (), {"dp_cp_group": group})
    return {name: state[name] for name in chain.parameters()}


def pieces(entries: dict[str, Any]) -> dict[str, list[Any]]:
    """Pieces of a sharded state that this rank has, by name."""
    from megatron.core.dist_checkpointing.mapping import apply_factories

    apply_factories(entries)
    return {n: entry if isinstance(entry, list) else [entry] for n, entry in entries.items()}


def whole(chain: Chain) -> dict[str, Tensor]:
    """Parameters put together from the pieces of all ranks; these agree where they overlap."""
    own = {
        name: [(p.global_shape, p.global_slice(), p.data.detach()) for p in entries]
        for name, entries in pieces(sharded(chain)).items()
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    found = {}
    for name in own:
        placed = [piece for of_rank in every for piece in of_rank[name]]
        result = torch.full(placed[0][0], torch.nan, dtype=torch.float64)
        for shape, place, data in placed:
            assert shape == result.shape
            assert (result[place] - data).nan_to_num().abs().max() < 1e-12, name
            result[place] = data
        assert not result.isnan().any(), name
        found[name] = result
    return found


def fill(chain: Chain, values: Mapping[str, Tensor]) -> None:
    """Load whole parameters."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    parameters = chain.parameters()
    entries = sharded(chain)
    merges = {
        name: entry.merge_fn if isinstance(entry, ShardedTensorFactory) else lambda given: given[0]
        for name, entry in entries.items()
    }
    for name, own in pieces(entries).items():
        loaded = merges[name]([values[name][piece.global_slice()] for piece in own])
        parameters[name].data.copy_(loaded)


def read(backbone: Backbone, folder: Path) -> dict[str, Tensor]:
    """Factors of a checkpoint, read without tensor parallelism."""
    from megatron.core import dist_checkpointing, parallel_state

    parallel_state.initialize_model_parallel()
    chain = build_chain(backbone, torch.float64)
    names = adapter_names(backbone)
    state = {name: entry for name, entry in sharded(chain).items() if name in names}
    loaded: dict[str, Tensor] = dist_checkpointing.load(state, str(folder))
    parallel_state.destroy_model_parallel()
    return {name: tensor.detach() for name, tensor in loaded.items()}


def compare_layouts(folder: Path) -> dict[str, float]:
    """Largest difference of factors between layouts, relative to their change, for each case."""
    from megatron_pulse.integration.checkpoint.saving import patch_saving

    patch_saving()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    every = [(case, DROPPING) for case in TENSOR]
    every += [(case, replace(DROPPING, type="dora")) for case in WITH_DORA_TOO]
    for case, adapter in every:
        backbone = adapted(*TENSOR[case], adapter)
        start, alone = factors_after(backbone, 1, False)
        for sequence_parallel in (False, True):
            saved = (
                folder if case == SAVED and adapter.type == "dora" and sequence_parallel else None
            )
            before, after = factors_after(backbone, 2, sequence_parallel, saved)
            for name in start:
                same = torch.allclose if name.endswith(M) else torch.equal
                assert same(before[name], start[name]), (case, name)
            errors = [
                ((after[n] - p).abs().max() / (p - start[n]).abs().max().clamp_min(1e-12)).item()
                for n, p in alone.items()
            ]
            found[f"{case} {adapter.type} {sequence_parallel}"] = max(errors)
            if saved is not None:
                loaded = read(backbone, folder)
                assert loaded.keys() == after.keys()
                assert all(torch.equal(loaded[name], after[name]) for name in after)
    dist.barrier()
    return found


def test_tensor_and_sequence_parallel_ranks_train_the_same_factors(tmp_path: Path) -> None:
    """Initial weights are equal, trained factors to rounding; one process reads what two saved."""
    found, _ = run_ranks(2, compare_layouts, tmp_path, timeout_s=300)
    assert len(found) == 2 * (len(TENSOR) + len(WITH_DORA_TOO))
    assert max(found.values()) < 1e-6, {k: v for k, v in found.items() if v > 1e-6}


def test_training_starts_from_a_file_of_published_names(tmp_path: Path, one_rank: None) -> None:
    adapter = Adapter(3, 6.0)
    drawn = factors_of(build_chain(adapted("dit-tiny", {}, adapter)))
    given = {name: torch.randn(parameter.shape) for name, parameter in drawn.items()}
    write_adapter(tmp_path / "dit", "peft", adapter, given, "DiTTransformer2DModel")
    part = TrainedPart(adapter=adapter.to_record())
    backbone = model_specs.load_backbone("dit-tiny")
    started = model_specs.trained_as(backbone, part, str(tmp_path / "dit"))
    found = factors_of(build_chain(started))
    assert found.keys() == given.keys()
    assert all(torch.equal(parameter, given[name]) for name, parameter in found.items())


def test_locked_weights_take_no_adapter() -> None:
    names = adapter_names(adapted(*FAMILIES["controlnet"], Adapter(2, 2.0)))
    assert names and all(name.startswith("controlnet.") for name in names.values())


@pytest.mark.parametrize("family", EVERY)
def test_default_targets_are_the_projections_of_attention(family: str) -> None:
    if family == "example":  # has no attention
        with pytest.raises(Faults, match="default targets match no layer"):
            adapted(*EVERY[family], Adapter())
        return
    backbone = adapted(*EVERY[family], Adapter())
    names = {name.rpartition(".lora_")[0] for name in adapter_names(backbone).values()}
    ends = ("to_out.0", "to_add_out", "attn.proj", "linear_proj")
    outputs = [name for name in names if name.endswith(ends)]
    others = [name for name in names if not name.endswith(ends)]
    assert outputs and others and all("proj_mlp" not in n and "ff" not in n for n in names)
    taken = Adapter.from_record(backbone.record["adapter"]).targets
    assert taken in DEFAULT_TARGETS
    choice = AdapterChoice("lora")
    assert choice.describes(backbone.record["adapter"])
    other = AdapterChoice("lora", adapter_targets=("to_q",))
    assert not other.describes(backbone.record["adapter"])


def test_targets_are_published_names() -> None:
    with pytest.raises(Faults, match="'linear_qkv' matches no linear layer"):
        adapted("dit-tiny", {}, Adapter(2, 2.0, ("linear_qkv",)))


class Sequence(nn.Sequential):
    """Layer that would run its adapter as one of its modules."""

    def forward(self, inputs: Any, skips: Any, conditioning: Any) -> Any:
        return (super().forward(*inputs),)


def test_a_sequential_module_is_refused() -> None:
    spec = TensorSpec((4,))
    layer = Layer("first", lambda context: Sequence(nn.Linear(4, 4)), (spec,), (spec,))
    adapt_layers = functools.partial(adapt, {"": ()})
    backbone = Backbone("own", (layer, replace(layer, name="second")))
    with pytest.raises(ValueError, match="first: .*Sequential.*Wrap it in a module"):
        with_adapter(backbone, EVERYTHING, adapt=adapt_layers)
