"""Rules of sampling by diffusers' class; tests compare them with the pipelines."""

from __future__ import annotations

from megatron_pulse.diffusion.process_flags import FlowGrid
from megatron_pulse.diffusion.sampling_rules import (
    ProjectedGuide,
    SamplingRules,
    cogview4_grid,
    cogview4_shift,
    cosmos_grid,
    evened_first_frames,
    extrapolated,
    flux2_shift,
    framepack_shift,
    lumina2_shift,
    mochi_grid,
    rescaled,
    row_norms,
    token_norms,
)

_SCHEDULER_GRID = SamplingRules(flow_grid=FlowGrid.SCHEDULER)

BY_CLASS = {
    **dict.fromkeys(
        (
            "AuraFlowTransformer2DModel", "ChronoEditTransformer3DModel",
            "EasyAnimateTransformer3DModel", "HiDreamImageTransformer2DModel",
            "PRXTransformer2DModel", "SanaTransformer2DModel", "SanaVideoTransformer3DModel",
            "SD3Transformer2DModel", "SkyReelsV2Transformer3DModel", "WanTransformer3DModel",
            "WanVACETransformer3DModel",
        ),
        _SCHEDULER_GRID,
    ),
    "CogView4Transformer2DModel": SamplingRules(
        shift=cogview4_shift, trains_shifted=True, grid=cogview4_grid
    ),
    "CosmosTransformer3DModel": SamplingRules(
        guide=lambda: extrapolated,
        grid=cosmos_grid,
        scales_ends=True,
        settings={"use_karras_sigmas": False},
    ),
    "Flux2Transformer2DModel": SamplingRules(shift=flux2_shift),
    "HunyuanImageTransformer2DModel": SamplingRules(
        guide=ProjectedGuide,
        caution=(
            "HunyuanImage: guidance is projected from the 7th step on, as AdaptiveProjectedMix"
            "Guidance does by default; the guiders of a pipeline's folder may begin at another one"
        ),
    ),
    "HunyuanVideoFramepackTransformer3DModel": SamplingRules(
        shift=framepack_shift,
        caution=(
            "Framepack: a sample is one section behind the history of the data; its pipeline draws "
            "one after another"
        ),
    ),
    "Kandinsky5Transformer3DModel": SamplingRules(
        flow_grid=FlowGrid.SCHEDULER, finish=evened_first_frames
    ),
    "LTX2VideoTransformer3DModel": SamplingRules(
        caution=(
            "LTX-2: videos are drawn without sound, as with isolate_modalities; those of its "
            "pipeline also depend on the sound, and on further guidance unless stg_scale is 0, "
            "modality_scale 1 and guidance_rescale 0"
        )
    ),
    "Lumina2Transformer2DModel": SamplingRules(guide=rescaled(row_norms), shift=lumina2_shift),
    "MochiTransformer3DModel": SamplingRules(grid=mochi_grid),
    "QwenImageTransformer2DModel": SamplingRules(guide=rescaled(token_norms)),
}  # fmt: skip
