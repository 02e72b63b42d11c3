"""A run's layers, Megatron's own or Transformer Engine's, beside what its plan knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_pulse.integration.megatron.te_wgrad import te_can_defer_wgrad
from megatron_pulse.integration.planning.transformer_impl import (
    require_deferrable_wgrad,
    require_same_transformer_impl,
)
from megatron_pulse.planner.program.plan import PlanError
from megatron_pulse.profile.files import load_profile, save_profile
from megatron_pulse.profile.measurement.measure import measure
from megatron_pulse.profile.profile import ProfileError, Source
from tests.launch.sessions import ROOT
from tests.plans import small_profile
from tests.reference import unsealed_record
from tests.runtime.equality import Case, plan_of
from tests.runtime.tiny import backbone

LOCAL, ENGINE = (Namespace(transformer_impl=name) for name in ("local", "transformer_engine"))


def test_a_profile_says_of_which_layers_it_is(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(replace(small_profile(), transformer_impl="transformer_engine"), path)
    assert load_profile(path).transformer_impl == "transformer_engine"
    record = unsealed_record(path)
    path.write_text(json.dumps({**record, "transformer_impl": "apex"}))
    with pytest.raises(ProfileError, match="it must be one of local, transformer_engine"):
        load_profile(path)
    del record["transformer_impl"]  # of before
    path.write_text(json.dumps(record))
    assert load_profile(path).transformer_impl == "local"


def test_a_run_takes_times_of_its_own_layers() -> None:
    measured = replace(small_profile(), source=Source.MEASURED)
    theirs = replace(measured, transformer_impl="transformer_engine")
    require_same_transformer_impl(LOCAL, measured, "--pulse-profile p.json")
    require_same_transformer_impl(ENGINE, theirs, "--pulse-profile p.json")
    require_same_transformer_impl(ENGINE, replace(measured, source=Source.ANALYTIC), "A100")
    with pytest.raises(ProfileError, match=r"p.json was measured with .*-impl local, but .*"
                       r"'pulse profile --transformer-impl transformer_engine'"):  # fmt: skip
        require_same_transformer_impl(ENGINE, measured, "--pulse-profile p.json")
    with pytest.raises(ProfileError, match="or run with --transformer-impl transformer_engine"):
        require_same_transformer_impl(LOCAL, theirs, "--pulse-profile p.json")


def test_layers_whose_gradients_cannot_wait_take_no_split_schedule() -> None:
    if te_can_defer_wgrad():
        pytest.skip("Transformer Engine is here, and its gradients can wait")
    chain = backbone("dit")
    for name, refused in (("wave", False), ("zb-v", True)):
        plan = plan_of(chain, Case("fold", 2, schedule=name), 2)
        require_deferrable_wgrad(LOCAL, plan)
        if refused:
            with pytest.raises(PlanError, match="zb-v.*>=2.3.0.*or --transformer-impl local"):
                require_deferrable_wgrad(ENGINE, plan)
        else:
            require_deferrable_wgrad(ENGINE, plan)


def test_they_are_measured_where_they_run() -> None:
    if torch.cuda.is_available():
        pytest.skip("they may run here")
    with pytest.raises(ProfileError, match="runs on GPUs alone"):
        measure(backbone("dit"), [1], "cpu", "float32", transformer_impl="transformer_engine")


_ENGINE_WITHOUT_A_GPU = """
def nothing(*args, **kwargs):
    raise RuntimeError("CUDA error: no CUDA-capable device is detected")


FusedAdam = multi_tensor_applier = multi_tensor_l2norm = multi_tensor_scale = nothing
"""


def test_kernels_that_are_installed_are_not_taken_without_a_gpu(tmp_path: Path) -> None:
    """Transformer Engine can be imported on a CPU, and its Adam and norms fail there."""
    for inside in ("transformer_engine", "transformer_engine/pytorch"):
        (tmp_path / inside).mkdir()
        (tmp_path / inside / "__init__.py").touch()
    (tmp_path / "transformer_engine/pytorch/optimizers.py").write_text(_ENGINE_WITHOUT_A_GPU)
    code = """
from megatron_pulse.integration.megatron import compat
compat.install()
import torch
from megatron.core import optimizer
from megatron.core.optimizer import clip_grads
from megatron.training.utils import common_utils
compat.patch_megatron()
weight = torch.nn.Parameter(torch.ones(3))
weight.grad = torch.full((3,), 2.0)
optimizer.Adam([weight], lr=0.5).step()
assert all(abs(w - 0.5) < 1e-6 for w in weight.tolist()), weight
for module, norm in ((clip_grads, "l2_norm_impl"), (common_utils, "multi_tensor_l2norm")):
    found = module.multi_tensor_applier(getattr(module, norm), None, [[weight.grad]], False)
    assert abs(found[0].item() - 12 ** 0.5) < 1e-6, found
"""
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, text=True,
        capture_output=True, timeout=300,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr


def test_copies_together_have_the_bits_of_copies_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clipping, and rounding fp32 masters to parameters, as on a GPU."""
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.utils import local_multi_tensor_scale

    from megatron_pulse.integration.megatron.compat import _copy_together

    one_by_one = optimizer._multi_tensor_copy_this_to_that
    monkeypatch.setattr(optimizer, "_multi_tensor_copy_this_to_that", one_by_one)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", local_multi_tensor_scale)
    _copy_together()
    assert optimizer._multi_tensor_copy_this_to_that is not one_by_one
    generator = torch.Generator().manual_seed(0)
    masters = [torch.randn(n, generator=generator) for n in (1, 7, 1000)]
    for scale, copy in (
        (local_multi_tensor_scale, one_by_one),
        (clip_grads.multi_tensor_scale_impl, optimizer._multi_tensor_copy_this_to_that),
    ):
        values = [master.clone() for master in masters]
        rounded = [torch.empty_like(master, dtype=torch.bfloat16) for master in masters]
        scale(1, None, [values, values], 0.37)
        other = [torch.empty_like(value) for value in values]
        scale(1, None, [values, other], 0.5)
        copy(values, rounded)
        copy([], [])
        for value, half, low, master in zip(values, other, rounded, masters, strict=True):
            assert torch.equal(value, master * 0.37) and torch.equal(half, value * 0.5)
            assert torch.equal(low, value.bfloat16())


def test_gloo_is_not_asked_for_where_gpus_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_pulse.integration.flags.startup_checks import _check_processes

    asked = Namespace(distributed_backend="gloo", num_workers=8)
    assert not list(_check_processes(asked))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (fault,) = _check_processes(asked)
    assert "so messages use NCCL. Leave it out" in fault
