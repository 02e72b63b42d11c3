"""Rules of sampling by diffusers' class; tests compare them with the pipelines."""

from __future__ import annotations

from megatron_pulse.diffusion.sampling_rules import (
    SamplingRules,
    flux2_shift,
    mochi_grid,
    row_norms,
    token_norms,
)

BY_CLASS = {
    "QwenImageTransformer2DModel": SamplingRules(norms=token_norms),
    "Lumina2Transformer2DModel": SamplingRules(norms=row_norms),
    "MochiTransformer3DModel": SamplingRules(grid=mochi_grid),
    "Flux2Transformer2DModel": SamplingRules(shift=flux2_shift),
}
