"""Tiny random encoders and tokenizers, as folders of diffusers' pipelines have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ["<pad>", "</s>", "<s>", "<unk>", *"a red blue bird heart cat with of the very old".split()]
LENGTH = 9


def make_tokenizer(folder: Path, kind: str, length: int | None = LENGTH) -> None:
    """Words as tokens; ``kind`` clip adds begin and end, t5 an end."""
    tokens = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    begin = "" if kind == "t5" else "<s> "
    tokens.post_processor = processors.TemplateProcessing(
        single=f"{begin}$A </s>", special_tokens=[("<s>", 2), ("</s>", 1)]
    )
    said = {} if length is None else {"model_max_length": length}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, unk_token="<unk>", eos_token="</s>", bos_token="<s>",
        pad_token="</s>" if kind == "clip" else "<pad>", **said,
    ).save_pretrained(folder)  # fmt: skip


def make_encoder(kind: str, width: int = 8, projection: int = 8, layers: int = 3) -> Any:
    """``clip``, ``projected``, ``t5`` or ``bert``, random, in eval mode."""
    if kind == "t5":
        t5 = transformers.T5Config(
            vocab_size=len(WORDS), d_model=width, d_kv=4, d_ff=12, num_layers=layers, num_heads=2,
            feed_forward_proj="gated-gelu",
        )  # fmt: skip
        return transformers.T5EncoderModel(t5).eval()
    if kind == "bert":
        bert = transformers.BertConfig(
            vocab_size=len(WORDS), hidden_size=width, num_hidden_layers=layers,
            num_attention_heads=2, intermediate_size=12, max_position_embeddings=80,
        )  # fmt: skip
        return transformers.BertModel(bert).eval()
    clip = transformers.CLIPTextConfig(
        vocab_size=len(WORDS), hidden_size=width, intermediate_size=12, num_hidden_layers=layers,
        num_attention_heads=2, max_position_embeddings=LENGTH, projection_dim=projection,
        eos_token_id=1, bos_token_id=2, pad_token_id=1,
        hidden_act="quick_gelu" if kind == "clip" else "gelu",
    )  # fmt: skip
    if kind == "clip":
        return transformers.CLIPTextModel(clip).eval()
    return transformers.CLIPTextModelWithProjection(clip).eval()


def make_pipeline(folder: Path, *encoders: Any, **index: Any) -> Path:
    """A folder with these encoders: kinds, or (kind, width, projection)."""
    torch.manual_seed(0)
    for i, given in enumerate(encoders):
        kind, *sizes = [given] if isinstance(given, str) else given
        suffix = f"_{i + 1}" if i else ""
        make_encoder(kind, *sizes).save_pretrained(folder / f"text_encoder{suffix}")
        tokens = "clip" if kind == "projected" else kind
        make_tokenizer(folder / f"tokenizer{suffix}", tokens)
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
