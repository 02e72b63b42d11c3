"""Texts that diffusers' pipelines put around a prompt, taken from the installed diffusers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rendering:
    """Function from a prompt to its text; ``special``: the tokenizer adds its special tokens."""

    text: Callable[[str], str]
    special: bool = True


def rendering(pipeline: str, tokenizer: Any) -> Rendering:
    """Rendering of prompts by a ``pipeline`` of diffusers that has a template."""
    return _RENDERINGS[pipeline](tokenizer)


def _hunyuan_video(tokenizer: Any) -> Rendering:
    from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video

    return Rendering(pipeline_hunyuan_video.DEFAULT_PROMPT_TEMPLATE["template"].format)


def _hunyuan_video_15(tokenizer: Any) -> Rendering:
    import diffusers

    get_states = diffusers.HunyuanVideo15Pipeline._get_mllm_prompt_embeds
    system = inspect.signature(get_states).parameters["system_message"].default

    def render(prompt: str) -> str:
        said = [("system", system), ("user", prompt or " ")]
        return _chat(tokenizer, said, add_generation_prompt=True)

    return Rendering(render, special=False)


_QUOTED = re.compile(r'"(.*?)"|“(.*?)”')


def _glyphs(tokenizer: Any) -> Rendering:
    """Texts in quotes, for the encoder of written words."""

    def render(prompt: str) -> str:
        found = dict.fromkeys(straight or curly for straight, curly in _QUOTED.findall(prompt))
        return "".join(f'Text "{text}". ' for text in found)

    return Rendering(render)


def _hunyuan_image_glyphs(tokenizer: Any) -> Rendering:
    """Texts in quotes of either kind, for the encoder of written words."""
    from diffusers.pipelines.hunyuan_image.pipeline_hunyuanimage import extract_glyph_text

    return Rendering(lambda prompt: extract_glyph_text(prompt) or "")


def _of_image(pipeline: str) -> Callable[[Any], Rendering]:
    """Template in an attribute of pipelines of pictures."""
    return lambda tokenizer: Rendering(_bare(pipeline).prompt_template_encode.format)


def _qwen_image_edit(before: str, pipeline: str) -> Callable[[Any], Rendering]:
    def make(tokenizer: Any) -> Rendering:
        template = _bare(pipeline).prompt_template_encode
        return Rendering(lambda prompt: template.format(before + prompt))

    return make


def _lumina2(tokenizer: Any) -> Rendering:
    system = _bare("Lumina2Pipeline").system_prompt
    return Rendering(lambda prompt: f"{system} <Prompt Start> {prompt}")


def _sana(tokenizer: Any) -> Rendering:
    import diffusers

    called = inspect.signature(diffusers.SanaPipeline.__call__)
    lines = called.parameters["complex_human_instruction"].default
    return Rendering(("\n".join(lines) + "{}").format)


def _flux2(tokenizer: Any) -> Rendering:
    system = _bare("Flux2Pipeline").system_message
    begin = tokenizer.bos_token

    def render(prompt: str) -> str:
        said = [("system", system), ("user", prompt.replace("[IMG]", ""))]
        parts = [(role, [{"type": "text", "text": text}]) for role, text in said]
        return _chat(tokenizer, parts, add_generation_prompt=False)

    # As transformers' processors do: a template that writes the first token needs no second one.
    return Rendering(render, special=begin is None or not render("").startswith(begin))


def _thinking(enabled: bool) -> Callable[[Any], Rendering]:
    def make(tokenizer: Any) -> Rendering:
        settings = {"add_generation_prompt": True, "enable_thinking": enabled}
        return Rendering(lambda prompt: _chat(tokenizer, [("user", prompt)], **settings))

    return make


def _chat(tokenizer: Any, said: list[tuple[str, Any]], **settings: Any) -> str:
    messages = [{"role": role, "content": content} for role, content in said]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **settings))


def _bare(pipeline: str) -> Any:
    """Pipeline without components, which has its prompts as attributes."""
    import diffusers

    kind = getattr(diffusers, pipeline)
    return kind(**dict.fromkeys(list(inspect.signature(kind).parameters)))


GLYPHS = "HunyuanVideo15Pipeline glyphs"
"""Name of the template of HunyuanVideo 1.5's second encoder."""
_RENDERINGS: dict[str, Callable[[Any], Rendering]] = {
    "HunyuanVideoPipeline": _hunyuan_video,
    "HunyuanVideo15Pipeline": _hunyuan_video_15,
    GLYPHS: _glyphs,
    "HunyuanImagePipeline": _of_image("HunyuanImagePipeline"),
    "HunyuanImagePipeline glyphs": _hunyuan_image_glyphs,
    "QwenImagePipeline": _of_image("QwenImagePipeline"),
    "QwenImageEditPipeline": _qwen_image_edit("", "QwenImageEditPipeline"),
    "QwenImageEditPlusPipeline": _qwen_image_edit(
        "Picture 1: <|vision_start|><|image_pad|><|vision_end|>", "QwenImageEditPlusPipeline"
    ),
    "Lumina2Pipeline": _lumina2,
    "SanaPipeline": _sana,
    "Flux2Pipeline": _flux2,
    "Flux2KleinPipeline": _thinking(False),
    "ZImagePipeline": _thinking(True),
}
