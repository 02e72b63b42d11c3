"""A run's layers, Megatron's own or Transformer Engine's, beside what its plan knows."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_pulse.integration.megatron.engine import engine_waits
from megatron_pulse.integration.planning.layers import require_own_layers, require_waiting_layers
from megatron_pulse.planner.step.plan import PlanError
from megatron_pulse.profile.files import load_profile, save_profile
from megatron_pulse.profile.measuring.measure import measure
from megatron_pulse.profile.profile import ProfileError, Source
from tests.by_hand import unsealed_record
from tests.plans import small_profile
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
    require_own_layers(LOCAL, measured, "--pulse-profile p.json")
    require_own_layers(ENGINE, theirs, "--pulse-profile p.json")
    require_own_layers(ENGINE, replace(measured, source=Source.ANALYTIC), "A100")
    with pytest.raises(ProfileError, match=r"p.json was measured with layers of local, and .*"
                       r"'pulse profile --transformer-impl transformer_engine'"):  # fmt: skip
        require_own_layers(ENGINE, measured, "--pulse-profile p.json")
    with pytest.raises(ProfileError, match="or run with --transformer-impl transformer_engine"):
        require_own_layers(LOCAL, theirs, "--pulse-profile p.json")


def test_layers_whose_gradients_cannot_wait_take_no_split_schedule() -> None:
    if engine_waits():
        pytest.skip("Transformer Engine is here, and its gradients can wait")
    chain = backbone("dit")
    for name, refused in (("wave", False), ("zb-v", True)):
        plan = plan_of(chain, Case("fold", 2, schedule=name), 2)
        require_waiting_layers(LOCAL, plan)
        if refused:
            with pytest.raises(PlanError, match="zb-v.*>=2.3.0.*or --transformer-impl local"):
                require_waiting_layers(ENGINE, plan)
        else:
            require_waiting_layers(ENGINE, plan)


def test_they_are_measured_where_they_run() -> None:
    if torch.cuda.is_available():
        pytest.skip("they may run here")
    told = "not installed|runs on GPUs alone"
    with pytest.raises(ProfileError, match=told):
        measure(backbone("dit"), [1], "cpu", "float32", transformer_impl="transformer_engine")
