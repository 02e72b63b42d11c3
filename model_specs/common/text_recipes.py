"""Text recipes of the families: pipeline encoders and their states by batch field.

Imports no torch. The recipes follow ``encode_prompt`` of diffusers' pipelines; tests compare them.
"""

from __future__ import annotations

from megatron_pulse.encoders.text_recipe import ComponentKind, Part, State, TextRecipe

_FIRST_LAST = Part(1, State.LAST)
_PENULTIMATES = (Part(1, State.PENULTIMATE), Part(2, State.PENULTIMATE))

SD = TextRecipe(
    {"context": ((_FIRST_LAST,),)},
    {1: ComponentKind.CLIP},
    masked_if_said=True,
    inversions=True,
)
SDXL = TextRecipe(
    {"context": (_PENULTIMATES,), "pooled": ((Part(2, State.POOLED),),)},
    {1: ComponentKind.CLIP, 2: ComponentKind.PROJECTED_CLIP},
    zeros_if_empty=True,
    inversions=True,
)
SD3 = TextRecipe(
    {
        "context": (_PENULTIMATES, (Part(3, State.LAST),)),
        "pooled": ((Part(1, State.POOLED), Part(2, State.POOLED)),),
    },
    {1: ComponentKind.PROJECTED_CLIP, 2: ComponentKind.PROJECTED_CLIP, 3: ComponentKind.T5},
    fitted=frozenset({3}),
    padded_as={2: 1},
)
FLUX = TextRecipe(
    {"context": ((Part(2, State.LAST),),), "pooled": ((Part(1, State.POOLED),),)},
    {1: ComponentKind.CLIP, 2: ComponentKind.T5},
    fitted=frozenset({2}),
    inversions=True,
)
PIXART = TextRecipe(
    {"context": ((_FIRST_LAST,),), "context_mask": ((Part(1, State.MASK),),)},
    {1: ComponentKind.T5},
    masked=frozenset({1}),
    fitted=frozenset({1}),
    cleans=True,
)
HUNYUAN_DIT = TextRecipe(
    {
        "context": ((_FIRST_LAST,),),
        "context_mask": ((Part(1, State.MASK),),),
        "context_t5": ((Part(2, State.LAST),),),
        "context_t5_mask": ((Part(2, State.MASK),),),
    },
    {1: ComponentKind.BERT, 2: ComponentKind.T5},
    masked=frozenset({1, 2}),
    fitted=frozenset({1, 2}),
)
