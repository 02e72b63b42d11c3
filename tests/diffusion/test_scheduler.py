"""Published schedulers as processes: the same numbers as diffusers', there and back, or refused."""

import ast
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_pulse.backbone.published_weights import PublishedError
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import DynamicShift, Objective, ProcessChoice
from megatron_pulse.diffusion.process_from_flags import chosen_process
from megatron_pulse.diffusion.scheduler_export import sampling_settings, scheduler_of_process
from megatron_pulse.diffusion.scheduler_import import (
    OF_BETAS,
    OF_FLOW,
    SCHEDULER_FILE,
    SET_BY_PIPELINE,
    defaults_of,
    process_of_scheduler,
    read_process,
)
from tests.diffusion.schedulers import DESCRIBED, PUBLISHED


def scheduler_of(config):
    """diffusers' own scheduler of a configuration."""
    return getattr(diffusers, config["_class_name"]).from_config(config)


def signal_and_noise(process):
    """Shares of x_0 and of the noise in x_t at every timestep, in fp64."""
    steps = torch.arange(process.num_timesteps, dtype=torch.float32)
    one, zero = torch.ones(len(steps), 1, 1, 1), torch.zeros(len(steps), 1, 1, 1)
    parts = process.noised(one, zero, steps)[0], process.noised(zero, one, steps)[0]
    return tuple(part.flatten().double() for part in parts)


def assert_same_noise(process, config):
    """The SNR of every timestep is that of diffusers' scheduler."""
    signal, noise = signal_and_noise(process)
    expected = scheduler_of(config).alphas_cumprod.double().clone()
    if process.zero_terminal_snr and expected[-1] > 0:
        assert expected[-1] == 2**-24  # Euler's, which divides by it, writes that for 0
        expected[-1] = 0
    # CogVideoX computes its table in fp64, and not from betas.
    tolerance = {"rtol": 1e-6, "atol": 3e-7 if "CogVideoX" in config["_class_name"] else 1e-7}
    torch.testing.assert_close(signal**2, expected, **tolerance)
    torch.testing.assert_close(noise**2, 1 - expected, **tolerance)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_pipelines(name):
    config = PUBLISHED[name]
    process = process_of_scheduler(config)
    assert process.describe() == DESCRIBED[name]
    if process.objective == Objective.EDM:
        theirs = scheduler_of(config)
        theirs.set_timesteps(20)
        sigma = theirs.sigmas[:-1]
        signal, noise = (
            process.noised(one.view(-1, 1), (1 - one).view(-1, 1), theirs.timesteps)[0].flatten()
            for one in (torch.ones(20), torch.zeros(20))
        )
        torch.testing.assert_close(signal, (1 + sigma**2) ** -0.5, rtol=1e-5, atol=0)
        torch.testing.assert_close(noise / signal, sigma, rtol=1e-5, atol=0)
        return
    if process.objective != Objective.FLOW:
        assert_same_noise(process, config)
        prediction = {"epsilon": "epsilon", "v": "v_prediction"}[process.objective]
        assert scheduler_of(config).config.prediction_type == prediction
        return
    theirs = scheduler_of(config)
    num_tokens = 1024
    at_size = process.for_tokens(num_tokens)
    if theirs.config.use_dynamic_shifting:
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        theirs.set_timesteps(sigmas=np.linspace(1, 1 / 1000, 1000), mu=calculate_shift(num_tokens))
    # The times of training are the scheduler's own grid, of u from 1/1000 to 1 - 1/1000.
    flat = DiffusionProcess(Objective.FLOW, shift=at_size.shift)
    for i in range(1, 1000):
        assert flat.timestep(i / 1000) == pytest.approx(theirs.timesteps[1000 - i].item(), rel=1e-5)
        assert flat.timestep(i / 1000) / 1000 == pytest.approx(
            theirs.sigmas[1000 - i].item(), rel=1e-5
        )


@pytest.mark.parametrize("name", OF_BETAS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beta_schedule": "squaredcos_cap_v2", "beta_end": 0.5, "num_train_timesteps": 500},
        {"trained_betas": [0.001, 0.5, 0.25], "num_train_timesteps": 3, "beta_schedule": "exp"},
        {"prediction_type": "sample", "beta_schedule": "scaled_linear"},
        {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True},
    ],
    ids=["defaults", "cosine", "trained", "sample", "zero"],
)
def test_every_class_with_its_own_defaults(name, settings, tmp_path):
    config = {"_class_name": name, **settings}
    takes = scheduler_of({"_class_name": name}).config
    if not settings.keys() <= takes.keys():
        with pytest.raises(PublishedError, match="has no such setting"):
            process_of_scheduler(config)
        return
    process = process_of_scheduler(config)
    assert_same_noise(process, config)
    assert process_of_scheduler(scheduler_of_process(process, False)) == process


@pytest.mark.parametrize("name", [*PUBLISHED, *OF_BETAS, *OF_FLOW])
def test_what_was_read_is_written_again(name):
    config = PUBLISHED.get(name, {"_class_name": name})
    process = process_of_scheduler(config)
    again = scheduler_of_process(process, clip=False)
    assert {**config, "_diffusers_version": again["_diffusers_version"]} == again
    assert DiffusionProcess(**json.loads(json.dumps(process.to_dict()))) == process


def processes():
    """Processes of all kinds, as flags make them."""
    betas = st.builds(
        lambda **said: ProcessChoice(**said),
        objective=st.sampled_from(["v", "sample"]),
        noise_schedule=st.sampled_from(["linear", "scaled_linear"]),
        beta_end=st.sampled_from([None, 0.03]),
        zero_terminal_snr=st.sampled_from([None, True]),
        num_timesteps=st.sampled_from([None, 400]),
    )
    flows = st.builds(
        lambda **said: ProcessChoice(objective="flow", **said),
        flow_shift=st.sampled_from([None, "1", "2.5", "dynamic", "dynamic:0.4,2,64,900,linear"]),
        timestep_density=st.sampled_from([None, "uniform", "logit_normal"]),
        num_timesteps=st.sampled_from([None, 400]),
    )
    edms = st.builds(
        lambda **said: ProcessChoice(objective="edm", **said),
        logit_mean=st.sampled_from([None, 0.0]),
        timestep_density=st.sampled_from([None, "uniform"]),
    ).filter(lambda said: said.logit_mean is None or said.timestep_density is None)
    return st.one_of(betas, flows, edms).map(chosen_process)


@given(processes(), st.sampled_from([None, *PUBLISHED]), st.booleans())
def test_a_scheduler_is_found_for_every_process(process, published, clip):
    """Also one that was imported with another; diffusers takes it without a word."""
    if published:
        kept = {**vars(process), "scheduler": PUBLISHED[published]}
        process = DiffusionProcess(**kept)
    config = json.loads(json.dumps(scheduler_of_process(process, clip)))
    assert process_of_scheduler(config) == process
    theirs = scheduler_of(config)
    if process.objective == Objective.EDM:
        assert theirs.config.timestep_type == "continuous" and theirs.config.sigma_max == 700
    elif process.objective != Objective.FLOW:
        assert_same_noise(process, config)
    else:
        assert theirs.config.num_train_timesteps == process.num_timesteps
        dynamic = isinstance(process.shift, DynamicShift)
        assert theirs.config.use_dynamic_shifting == dynamic
        assert dynamic or theirs.shift == process.shift


def test_pixels_are_clipped_by_a_new_scheduler():
    process = DiffusionProcess(Objective.V)
    assert scheduler_of_process(process, clip=True)["clip_sample"] is True
    assert scheduler_of_process(process, clip=False)["clip_sample"] is False
    kept = process_of_scheduler(PUBLISHED["dit"])
    assert scheduler_of_process(kept, clip=True)["clip_sample"] is False


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"_class_name": "EDMEulerScheduler"}, ["EDM", "--objective and --noise-schedule"]),
        ({"_class_name": "EDMDPMSolverMultistepScheduler"}, ["EDM"]),
        ({"_class_name": "LCMScheduler"}, ["distilled"]),
        ({"_class_name": "TCDScheduler"}, ["distilled"]),
        ({"_class_name": "FlowMatchLCMScheduler"}, ["distilled"]),
        ({"_class_name": "DDPMWuerstchenScheduler"}, ["Cascade"]),
        ({"_class_name": "RePaintScheduler"}, ["supported classes"]),
        ({}, ["None"]),
        (
            {"_class_name": "DDIMScheduler", "beta_schedule": "sigmoid", "snr_shift_scale": 3.0},
            ["'sigmoid'", "--trained-betas", "snr_shift_scale is 3.0"],
        ),
        (
            {"_class_name": "EulerDiscreteScheduler", "timestep_type": "continuous"},
            ["continuous"],
        ),
        ({"_class_name": "DDPMScheduler", "prediction_type": "noise"}, ["'noise'"]),
        (
            {"_class_name": "DDPMScheduler", "beta_end": "x", "trained_betas": 3},
            ["'x'", "must be a list"],
        ),
        ({"_class_name": "DDPMScheduler", "num_train_timesteps": 10.5}, ["whole"]),
        ({"_class_name": "DDIMScheduler", "sigma_data": 0.5}, ["sigma_data"]),
        (
            {"_class_name": "DDIMScheduler", "rescale_betas_zero_snr": True},
            ["zero_terminal_snr excludes epsilon"],
        ),
        (
            {"_class_name": "PNDMScheduler", "rescale_betas_zero_snr": True},
            ["--[no-]zero-terminal-snr"],
        ),
        (
            {"_class_name": "DPMSolverMultistepScheduler", "prediction_type": "flow_prediction"},
            ["use_flow_sigmas is not set"],
        ),
        ({"_class_name": OF_FLOW[0], "invert_sigmas": True}, ["invert_sigmas"]),
        ({"_class_name": OF_FLOW[0], "shift": 0}, ["must be positive"]),
        ({"_class_name": "DDIMScheduler", "beta_schedule": [], "prediction_type": {}}, ["'[]'"]),
        ({"_class_name": OF_FLOW[0], "_megatron_pulse": {"speed": 1}}, ["speed"]),
        ({"_class_name": OF_FLOW[0], "shift": None}, ["shift is None"]),
        (
            {"_class_name": OF_FLOW[0], "use_dynamic_shifting": True, "base_shift": None},
            ["four numbers"],
        ),
        (
            {"_class_name": OF_FLOW[0], "use_dynamic_shifting": True, "time_shift_type": "cubic"},
            ["exponential or linear"],
        ),
        ({"_class_name": "DDIMScheduler", "use_flow_sigmas": True}, ["use_flow_sigmas is True"]),
    ],
)
def test_refused(config, words, tmp_path):
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    with pytest.raises(PublishedError) as error:
        read_process(tmp_path, ProcessChoice())
    for word in words:
        assert word in str(error.value)


def test_flags_come_before_the_scheduler(tmp_path):
    (tmp_path / "scheduler").mkdir()
    path = tmp_path / "scheduler" / "scheduler_config.json"

    def read(config, **said):
        path.write_text(json.dumps(config))
        process, remark = read_process(tmp_path, ProcessChoice(**said))
        if config["_class_name"] == "EDMEulerScheduler":
            assert "was not read" in remark
        else:
            own = process_of_scheduler(config)
            said_otherwise = f"by flags; {path} says {own.describe()}"
            assert remark == ("" if process == own else said_otherwise)
        return process.describe()

    sdxl = PUBLISHED["sdxl"]
    assert read(sdxl, objective="v", beta_end=0.014).startswith("v, scaled_linear betas 0.00085 to")
    assert "0.00085 to 0.014" in read(sdxl, beta_end=0.014)
    assert "0.00085 to 0.012" in read(sdxl, objective="epsilon")
    assert "v, cosine betas" in read(sdxl, objective="v", noise_schedule="cosine")
    assert "zero" in read(sdxl, objective="v", zero_terminal_snr=True)
    zero = PUBLISHED["sdxl-zero-snr"]
    assert "zero" not in read(zero, objective="epsilon", zero_terminal_snr=False)
    assert "shift 5" in read(PUBLISHED["flux-dev"], flow_shift="5")
    assert "dynamic:0.4,2,64,900" in read(
        {"_class_name": OF_FLOW[0], "use_dynamic_shifting": True, "base_shift": 0.4, "max_shift": 2,
         "base_image_seq_len": 64, "max_image_seq_len": 900}, flow_shift="dynamic",
    )  # fmt: skip
    assert read(PUBLISHED["sd3"], objective="v").startswith("v, scaled_linear")
    edm = {"_class_name": "EDMEulerScheduler"}
    assert "v, linear" in read(edm, objective="v", noise_schedule="linear")
    with pytest.raises(PublishedError, match="--noise-schedule"):
        read(edm, objective="v")
    with pytest.raises(PublishedError, match="--flow-shift"):
        read(edm, objective="flow")
    with pytest.raises(PublishedError, match="no noise schedule"):
        read(PUBLISHED["sd3"], beta_end=0.02)


@pytest.mark.parametrize("said", [{"clip_sample": True, "steps_offset": 0}, {}])
@pytest.mark.parametrize("pipeline", ["StableDiffusionPipeline", "DiTPipeline", None])
def test_a_pipeline_sets_what_its_class_does_in_diffusers(tmp_path, said, pipeline):
    """Also of what the file leaves out, and what is written after importing it."""
    (tmp_path / "scheduler").mkdir()
    path = tmp_path / "scheduler" / SCHEDULER_FILE
    config = {"_class_name": "DDIMScheduler", **said, "_use_default_values": ["clip_sample"]}
    path.write_text(json.dumps(config))
    if pipeline is not None:
        (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    process, remark = read_process(tmp_path, ProcessChoice())
    theirs = scheduler_of(config)
    if pipeline == "StableDiffusionPipeline":
        getattr(diffusers, pipeline)(*[None] * 4, theirs, None, None, requires_safety_checker=False)
        for said_here in ("clip_sample False (not True)", "steps_offset 1 (not 0)", pipeline):
            assert said_here in remark
    else:
        assert not remark
    for settings in (sampling_settings(process), scheduler_of_process(process, clip=True)):
        for key in ("clip_sample", "steps_offset"):
            assert settings.get(key, defaults_of("DDIMScheduler")[key]) == theirs.config[key]


def test_the_table_of_pipelines_is_that_of_diffusers():
    """Read from its sources; those without weights of torch (Onnx) are not imported here."""
    found = {}
    for path in (Path(diffusers.__file__).parent / "pipelines").rglob("*.py"):
        if "new_config[" not in (text := path.read_text()):
            continue
        for part in ast.parse(text).body:
            body = ast.get_source_segment(text, part)
            sets = dict(re.findall(r'new_config\["(steps_offset|clip_sample)"\] = (\w+)', body))
            if sets and isinstance(part, ast.ClassDef) and not part.name.startswith("Onnx"):
                found[part.name] = {key: ast.literal_eval(value) for key, value in sets.items()}
    assert found == SET_BY_PIPELINE


def test_solvers_of_flow():
    config = {
        "_class_name": "DPMSolverMultistepScheduler", "prediction_type": "flow_prediction",
        "use_flow_sigmas": True, "flow_shift": 3.0,
    }  # fmt: skip
    process = process_of_scheduler(config)
    assert process.shift == 3.0 and process.objective == Objective.FLOW
    theirs = scheduler_of(config)
    theirs.set_timesteps(100)
    for i, timestep in enumerate(theirs.timesteps.tolist()):
        u = (1 - i / 100) * (1 - 1 / 1000)
        t = DiffusionProcess(Objective.FLOW, shift=3.0).timestep(u)
        assert abs(t - timestep) <= 1 + 1e-3  # theirs are cut to whole numbers
    assert scheduler_of_process(process, False)["_class_name"] == config["_class_name"]


def test_times_that_are_shares_stay_so():
    """OmniGen's, whose class inverts them itself."""
    name, settings = OF_FLOW[0], {"invert_sigmas": True, "num_train_timesteps": 1}
    config = {"_class_name": name, "_diffusers_version": diffusers.__version__, **settings}
    process = process_of_scheduler(config, inverted=True)
    assert process.num_timesteps == 1000 and process.timestep(0.5) == 500
    assert scheduler_of_process(process, clip=False) == config
    with pytest.raises(PublishedError, match="invert_sigmas"):
        process_of_scheduler(config)
    chosen = DiffusionProcess(Objective.FLOW, shift=3.0)
    made = scheduler_of_process(chosen, clip=False, inverted=True)
    assert made["invert_sigmas"]
    assert replace(process_of_scheduler(made, inverted=True), scheduler={}) == chosen


def test_diffusers_passes_over_our_own_key(caplog):
    """The key begins with an underscore; diffusers warns of any other unknown key."""
    process = DiffusionProcess(Objective.FLOW, shift=2.0)
    config = scheduler_of_process(process, False)
    assert config["_megatron_pulse"]["density"] == "uniform"
    diffusers.utils.logging.enable_propagation()
    try:
        assert math.isclose(scheduler_of(config).shift, 2.0)
        assert not caplog.records
        scheduler_of({**config, "density": "uniform"})
        assert "not expected" in caplog.text
    finally:
        diffusers.utils.logging.disable_propagation()
