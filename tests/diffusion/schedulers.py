"""scheduler_config.json of the kinds that are published with the pipelines of all families.

None was compared with the published file itself. Second-hand sources agree with two: the numbers of
flux-dev are those that the package taproot has for Flux, and the schedule, betas and prediction of
hunyuan-dit-v1.2 are those of hydit/train.sh in a fork of HunyuanDiT. The others are from memory.
"""

from __future__ import annotations

import json
from typing import Any

_LATENT = '"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"'
_OLD = '"clip_sample": false, "set_alpha_to_one": false, "skip_prk_steps": true, "steps_offset": 1'
_SOLVER = (
    '"algorithm_type": "dpmsolver++", "dynamic_thresholding_ratio": 0.995, "euler_at_final": false,'
    '"lambda_min_clipped": -Infinity, "lower_order_final": true, "sample_max_value": 1.0,'
    '"solver_order": 2, "solver_type": "midpoint", "steps_offset": 0, "thresholding": false,'
    '"timestep_spacing": "linspace", "trained_betas": null, "use_karras_sigmas": false,'
    '"use_lu_lambdas": false, "variance_type": null'
)
_HUNYUAN = (
    '"_class_name": "DDPMScheduler", "_diffusers_version": "0.29.0.dev0", "beta_start": 0.00085,'
    '"beta_schedule": "scaled_linear", "clip_sample": false, "clip_sample_range": 1.0,'
    '"dynamic_thresholding_ratio": 0.995, "num_train_timesteps": 1000,'
    '"prediction_type": "v_prediction", "rescale_betas_zero_snr": false, "sample_max_value": 1.0,'
    '"set_alpha_to_one": false, "skip_prk_steps": true, "steps_offset": 1, "thresholding": false,'
    '"timestep_spacing": "leading", "trained_betas": null, "variance_type": "fixed_small"'
)
_FLUX = (
    '"_class_name": "FlowMatchEulerDiscreteScheduler", "_diffusers_version": "0.30.0.dev0",'
    '"base_image_seq_len": 256, "base_shift": 0.5, "max_image_seq_len": 4096, "max_shift": 1.15,'
    '"num_train_timesteps": 1000'
)
_TEXTS = {
    "sd-v1.5": f'"_class_name": "PNDMScheduler", {_LATENT}, {_OLD},'
    '"num_train_timesteps": 1000, "trained_betas": null',
    "sd-v2.1-v": f'"_class_name": "DDIMScheduler", {_LATENT}, {_OLD},'
    '"num_train_timesteps": 1000, "prediction_type": "v_prediction", "trained_betas": null',
    "sdxl": f'"_class_name": "EulerDiscreteScheduler", {_LATENT},'
    f'{_OLD}, "interpolation_type": "linear", "num_train_timesteps": 1000,'
    '"prediction_type": "epsilon", "sample_max_value": 1.0, "timestep_spacing": "leading",'
    '"trained_betas": null, "use_karras_sigmas": false',
    "sdxl-zero-snr": f'"_class_name": "EulerDiscreteScheduler", {_LATENT}, {_OLD},'
    '"num_train_timesteps": 1000, "prediction_type": "v_prediction",'
    '"rescale_betas_zero_snr": true, "timestep_spacing": "trailing"',
    "hunyuan-dit-v1.1": f'{_HUNYUAN}, "beta_end": 0.03',
    "hunyuan-dit-v1.2": f'{_HUNYUAN}, "beta_end": 0.018',
    "pixart": '"_class_name": "DPMSolverMultistepScheduler", "_diffusers_version": "0.22.0.dev0",'
    f'"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear", {_SOLVER},'
    '"num_train_timesteps": 1000, "prediction_type": "epsilon"',
    "dit": '"_class_name": "DDIMScheduler", "_diffusers_version": "0.12.0.dev0", "beta_end": 0.02,'
    '"beta_schedule": "linear", "beta_start": 0.0001, "clip_sample": false,'
    '"num_train_timesteps": 1000, "prediction_type": "epsilon", "set_alpha_to_one": true,'
    '"steps_offset": 0, "trained_betas": null',
    "sd3": '"_class_name": "FlowMatchEulerDiscreteScheduler", "_diffusers_version": "0.29.0.dev0",'
    '"num_train_timesteps": 1000, "shift": 3.0',
    "sd3.5": f'{_FLUX}, "shift": 3.0, "use_dynamic_shifting": false, "invert_sigmas": false,'
    '"shift_terminal": null, "use_beta_sigmas": false, "use_exponential_sigmas": false,'
    '"use_karras_sigmas": false',
    "flux-dev": f'{_FLUX}, "shift": 3.0, "use_dynamic_shifting": true',
    "flux-schnell": f'{_FLUX}, "shift": 1.0, "use_dynamic_shifting": false',
    "svd": f'"_class_name": "EulerDiscreteScheduler", {_LATENT}, {_OLD}, "clip_sample": false,'
    '"interpolation_type": "linear", "num_train_timesteps": 1000,'
    '"prediction_type": "v_prediction", "sigma_max": 700.0, "sigma_min": 0.002,'
    '"timestep_spacing": "leading", "timestep_type": "continuous", "use_karras_sigmas": true',
}
PUBLISHED: dict[str, dict[str, Any]] = {
    name: json.loads("{" + text + "}") for name, text in _TEXTS.items()
}
"""Of each pipeline; the process that it says is in ``DESCRIBED``."""

_FLOW = "times logit_normal(0, 1), 1000 timesteps"
DESCRIBED = {
    "sd-v1.5": "epsilon, scaled_linear betas 0.00085 to 0.012, 1000 timesteps",
    "sd-v2.1-v": "v, scaled_linear betas 0.00085 to 0.012, 1000 timesteps",
    "sdxl": "epsilon, scaled_linear betas 0.00085 to 0.012, 1000 timesteps",
    "sdxl-zero-snr": "v, scaled_linear betas 0.00085 to 0.012, zero terminal SNR, 1000 timesteps",
    "hunyuan-dit-v1.1": "v, scaled_linear betas 0.00085 to 0.03, 1000 timesteps",
    "hunyuan-dit-v1.2": "v, scaled_linear betas 0.00085 to 0.018, 1000 timesteps",
    "pixart": "epsilon, linear betas 0.0001 to 0.02, 1000 timesteps",
    "dit": "epsilon, linear betas 0.0001 to 0.02, 1000 timesteps",
    "sd3": f"flow, shift 3, {_FLOW}",
    "sd3.5": f"flow, shift 3, {_FLOW}",
    "flux-dev": f"flow, shift dynamic:0.5,1.15,256,4096, {_FLOW}",
    "flux-schnell": f"flow, shift 1, {_FLOW}",
    "svd": "edm, sigma / (1 + sigma) logit_normal(0.7, 1.6), 1000 timesteps",
}
