"""Text recipes of the families: pipeline encoders and their states by batch field.

Imports no torch. The recipes follow ``encode_prompt`` of diffusers' pipelines; tests compare them.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_pulse.backbone.appended_fields import REFERENCE_IMAGE
from megatron_pulse.encoders.text_recipe import (
    Cleaning,
    ComponentKind,
    Part,
    PromptTemplate,
    State,
    TextRecipe,
)

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
KOLORS = TextRecipe(
    {"context": ((Part(1, State.PENULTIMATE),),), "pooled": ((Part(1, State.POOLED),),)},
    {1: ComponentKind.GLM},
    masked=frozenset({1}),
    fitted=frozenset({1}),
    one_width=True,
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
    cleaning=Cleaning.CAPTION,
)
SUV = TextRecipe(
    {
        "context": ((_FIRST_LAST,),),
        "context_mask": ((Part(1, State.MASK),),),
        "pooled": ((Part(2, State.POOLED),),),
    },
    {1: ComponentKind.T5, 2: ComponentKind.PROJECTED_CLIP},
    masked=frozenset({1}),
    fitted=frozenset({1}),
    cleaning=Cleaning.CAPTION,
)
"""Recipe of Open-Sora Plan 1.5, whose encoders are in a folder as those of a pipeline."""
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

_T5 = TextRecipe({"context": ((_FIRST_LAST,),)}, {1: ComponentKind.T5}, fitted=frozenset({1}))
_MASKED_STATES = {"context": ((_FIRST_LAST,),), "context_mask": ((Part(1, State.MASK),),)}
COGVIDEOX = _T5
COGVIEW3 = replace(_T5, zeros_if_empty=True)
LTX = replace(_T5, fields=_MASKED_STATES)
LTX2 = TextRecipe(
    {
        "context": ((Part(1, State.CONNECTED),),),
        "context_mask": ((Part(1, State.CONNECTED_MASK),),),
    },
    {1: ComponentKind.GEMMA3},
    masked=frozenset({1}),
    fitted=frozenset({1}),
    left_padded=frozenset({1}),
    cleaning=Cleaning.SPACES,
)
MOCHI = replace(LTX, masked=frozenset({1}), no_tokens_if_empty=True)
CHROMA = replace(LTX, masked=frozenset({1}), inversions=True)
"""Recipe of Chroma. The backbone itself adds the first padding token to the mask."""
AURA_FLOW = replace(
    _T5, kinds={1: ComponentKind.UMT5}, masked=frozenset({1}), trimmed=frozenset({1})
)
COSMOS = replace(AURA_FLOW, kinds={1: ComponentKind.T5})
WAN = replace(AURA_FLOW, right_padded=frozenset({1}), cleaning=Cleaning.PROMPT)
HUNYUAN_VIDEO = TextRecipe(
    {
        "context": ((Part(1, State.HIDDEN, -3),),),
        "context_mask": ((Part(1, State.MASK),),),
        "pooled": ((Part(2, State.POOLED),),),
    },
    {1: ComponentKind.LLAMA, 2: ComponentKind.CLIP},
    masked=frozenset({1}),
    fitted=frozenset({1}),
    templates={1: PromptTemplate("HunyuanVideoPipeline", crop=95)},
)
QWEN_IMAGE = TextRecipe(
    _MASKED_STATES,
    {1: ComponentKind.QWEN_VL},
    masked=frozenset({1}),
    fitted=frozenset({1}),
    right_padded=frozenset({1}),
    trimmed=frozenset({1}),
    templates={1: PromptTemplate("QwenImagePipeline", crop=34)},
    never_beside=frozenset({REFERENCE_IMAGE}),
)
QWEN_IMAGE_EDIT = replace(
    QWEN_IMAGE,
    templates={1: PromptTemplate("QwenImageEditPipeline", crop=64)},
    beside=frozenset({REFERENCE_IMAGE}),
    never_beside=frozenset(),
    sees=True,
)


def _flux2(kind: ComponentKind, pipeline: str, layers: tuple[int, ...]) -> TextRecipe:
    return TextRecipe(
        {"context": (tuple(Part(1, State.HIDDEN, layer) for layer in layers),)},
        {1: kind},
        masked=frozenset({1}),
        fitted=frozenset({1}),
        templates={1: PromptTemplate(pipeline)},
    )


FLUX2 = replace(
    _flux2(ComponentKind.MISTRAL, "Flux2Pipeline", (10, 20, 30)), beside=frozenset({"guidance"})
)
FLUX2_KLEIN = _flux2(ComponentKind.QWEN3, "Flux2KleinPipeline", (9, 18, 27))
LUMINA2 = TextRecipe(
    {
        "context": ((Part(1, State.PENULTIMATE),),),
        "context_mask": ((Part(1, State.MASK),),),
    },
    {1: ComponentKind.GEMMA2},
    masked=frozenset({1}),
    fitted=frozenset({1}),
    right_padded=frozenset({1}),
    templates={1: PromptTemplate("Lumina2Pipeline", on_negative=False)},
)
SANA = replace(
    LUMINA2,
    fields=_MASKED_STATES,
    templates={1: PromptTemplate("SanaPipeline", crop=None, on_negative=False)},
    cleaning=Cleaning.LOWER_CASE,
)
Z_IMAGE = replace(
    LUMINA2,
    kinds={1: ComponentKind.QWEN3},
    trimmed=frozenset({1}),
    templates={1: PromptTemplate("ZImagePipeline")},
)
HUNYUAN_VIDEO_15 = TextRecipe(
    {
        "context": ((Part(1, State.HIDDEN, -3),),),
        "context_mask": ((Part(1, State.MASK),),),
        "context_byt5": ((Part(2, State.LAST),),),
        "context_byt5_mask": ((Part(2, State.MASK),),),
    },
    {1: ComponentKind.QWEN_VL_TEXT, 2: ComponentKind.T5},
    masked=frozenset({1, 2}),
    fitted=frozenset({1, 2}),
    absent=frozenset({2}),
    templates={
        1: PromptTemplate("HunyuanVideo15Pipeline", crop=108),
        2: PromptTemplate("HunyuanVideo15Pipeline glyphs"),
    },
)
HUNYUAN_IMAGE = replace(
    HUNYUAN_VIDEO_15,
    kinds={1: ComponentKind.QWEN_VL, 2: ComponentKind.T5},
    templates={
        1: PromptTemplate("HunyuanImagePipeline", crop=34),
        2: PromptTemplate("HunyuanImagePipeline glyphs"),
    },
)

BY_CLASS: dict[str, tuple[TextRecipe, ...]] = {
    "UNet2DConditionModel": (KOLORS,),
    "UNet3DConditionModel": (SD,),
    "UNetMotionModel": (SD,),
    "I2VGenXLUNet": (SD,),
    "WanTransformer3DModel": (WAN,),
    "WanVACETransformer3DModel": (WAN,),
    "ChronoEditTransformer3DModel": (WAN,),
    "SkyReelsV2Transformer3DModel": (WAN,),
    "CosmosTransformer3DModel": (COSMOS,),
    "AllegroTransformer3DModel": (PIXART,),
    "CogView3PlusTransformer2DModel": (COGVIEW3,),
    "HunyuanVideoTransformer3DModel": (HUNYUAN_VIDEO,),
    "HunyuanVideoFramepackTransformer3DModel": (HUNYUAN_VIDEO,),
    "HunyuanVideo15Transformer3DModel": (HUNYUAN_VIDEO_15,),
    "HunyuanImageTransformer2DModel": (HUNYUAN_IMAGE,),
    "CogVideoXTransformer3DModel": (COGVIDEOX,),
    "LTXVideoTransformer3DModel": (LTX,),
    "LTX2VideoTransformer3DModel": (LTX2,),
    "MochiTransformer3DModel": (MOCHI,),
    "ChromaTransformer2DModel": (CHROMA,),
    "AuraFlowTransformer2DModel": (AURA_FLOW,),
    "QwenImageTransformer2DModel": (QWEN_IMAGE, QWEN_IMAGE_EDIT),
    "Flux2Transformer2DModel": (FLUX2, FLUX2_KLEIN),
    "Lumina2Transformer2DModel": (LUMINA2,),
    "SanaTransformer2DModel": (SANA,),
    "ZImageTransformer2DModel": (Z_IMAGE,),
}
"""Recipes of diffusers' classes beside those of the family that is published as the class."""
