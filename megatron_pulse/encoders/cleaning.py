"""Cleaning of texts before tokenization, as in diffusers' pipelines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def cleaned(text: str) -> str:
    """Clean a prompt as PixArt's pipelines do by default: without addresses, tags and file names.

    If ``cleans`` is false, the text is only lowercased and stripped.
    """
    return text.lower().strip() if (clean := _cleaner()) is None else clean(clean(text))


def cleans() -> bool:
    """True if diffusers' packages for cleaning texts are installed (bs4 and ftfy)."""
    return _cleaner() is not None


@functools.cache
def _cleaner() -> Callable[[str], str] | None:
    from diffusers.utils import is_bs4_available, is_ftfy_available

    if not (is_bs4_available() and is_ftfy_available()):
        return None
    from diffusers import PixArtAlphaPipeline

    pipeline: Any = object.__new__(PixArtAlphaPipeline)  # the method needs no component
    clean: Callable[[str], str] = pipeline._clean_caption
    return clean


def with_all_vectors(text: str, tokenizer: Any) -> str:
    """Expand tokens of textual inversion to all their vectors (``<cat>`` to ``<cat> <cat>_1 ...``).

    ``load_textual_inversion`` of diffusers trains them in this form.
    """
    added = tokenizer.added_tokens_encoder
    if not any(f"{token}_1" in added for token in added):
        return text
    for token in dict.fromkeys(tokenizer.tokenize(text)):
        if token not in added:
            continue
        tokens = [token]
        while (more := f"{token}_{len(tokens)}") in added:
            tokens.append(more)
        text = text.replace(token, " ".join(tokens))
    return text
