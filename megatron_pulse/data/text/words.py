"""Text states without a text encoder: every word is a fixed random vector.

A stand-in for small experiments, which needs no download and no training. A backbone can learn
which picture a word goes with; what it cannot do is tell from the states that two words are
alike, or understand a word that no caption had. For real text encode the captions with a real
encoder (CLIP, T5) once, and write the states into a latent folder.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from megatron_pulse.data.dataset import FieldSpec
from megatron_pulse.encoders.recipe import is_text

_END = ""
"""Stands behind the last word, as the end token of CLIP and T5 does: no text is without token."""


def split_words(text: str) -> list[str]:
    """The words of ``text``, in lower case: runs of letters and digits of any script."""
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFC", text).lower())


class WordEncoder:
    """Encodes text as those of the asked ``fields`` that are text.

    ``context* [L, d]``: word i is its own vector plus that of position i, each drawn from N(0, I)
    by Philox from a BLAKE2b hash (of the word, of i) and scaled by 1/sqrt(2); an end token
    follows, then zeros. Words beyond L - 1 are cut off. ``context*_mask [L]``: 1 at words and
    end. ``pooled* [d]``: the sum of the words' vectors, end included, over the square root of
    their number. Every element so has unit variance over words.
    """

    def __init__(self, fields: Mapping[str, FieldSpec]) -> None:
        self.fields = {name: spec for name, spec in fields.items() if _encodes(name, spec)}

    def __call__(self, text: str) -> dict[str, Tensor]:
        """The tensor of every field; ``""`` gives the null conditioning, the end token alone."""
        words = split_words(text)
        return {name: _encode(name, spec, words) for name, spec in self.fields.items()}


def _encodes(name: str, spec: FieldSpec) -> bool:
    vector = name.startswith("pooled") or name.endswith("_mask")
    return is_text(name) and len(spec.shape) == (1 if vector else 2)


def _encode(name: str, spec: FieldSpec, words: list[str]) -> Tensor:
    if name.startswith("pooled"):
        vectors = [_vector("word", word, spec.shape[0]) for word in [*words, _END]]
        pooled = np.sum(vectors, axis=0, dtype=np.float64) / math.sqrt(len(vectors))
        return torch.from_numpy(pooled.astype(np.float32))
    kept = [*words[: spec.shape[0] - 1], _END]
    if name.endswith("_mask"):
        return (torch.arange(spec.shape[0]) < len(kept)).to(spec.torch_dtype)
    states = torch.zeros(spec.shape)
    for i, word in enumerate(kept):
        width = spec.shape[1]
        state = _vector("word", word, width) + _vector("position", str(i), width)
        states[i] = torch.from_numpy(state / np.float32(math.sqrt(2)))
    return states


@lru_cache(maxsize=100_000)
def _vector(kind: str, text: str, width: int) -> np.ndarray:
    digest = hashlib.blake2b(text.encode(), digest_size=16, person=kind.encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype="<u8")))
    drawn: np.ndarray = generator.standard_normal(width, dtype=np.float32)
    return drawn
