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


CHAT = (
    "{% for m in messages %}{{ '<s> ' if loop.first else '' }}{{ m.role }} "
    "{{ m.content if m.content is string else m.content[0].text }} </s> {% endfor %}"
    "{{ '<s> red ' if add_generation_prompt else '' }}{{ 'old ' if enable_thinking else '' }}"
)
"""Chat template, of messages of text or of parts."""


def make_tokenizer(folder: Path, kind: str, length: int | None = LENGTH) -> None:
    """Words as tokens; ``kind`` clip adds begin and end, t5 an end, glm is ChatGLM's."""
    if kind == "glm":
        make_glm_tokenizer(folder)
        return
    tokens = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    begin = "" if kind.endswith("t5") else "<s> "
    tokens.post_processor = processors.TemplateProcessing(
        single=f"{begin}$A </s>", special_tokens=[("<s>", 2), ("</s>", 1)]
    )
    said = {} if length is None else {"model_max_length": length}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, unk_token="<unk>", eos_token="</s>", bos_token="<s>",
        pad_token="</s>" if kind == "clip" else "<pad>", chat_template=CHAT, **said,
    ).save_pretrained(folder)  # fmt: skip


def make_glm_tokenizer(folder: Path) -> None:
    """ChatGLM's tokenizer, whose vocabulary is SentencePiece's."""
    import sentencepiece
    from diffusers.pipelines.kolors.tokenizer import ChatGLMTokenizer

    folder.mkdir(parents=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(WORDS[4:])] * 4), vocab_size=26, minloglevel=2,
        model_prefix=str(folder / "tokenizer"), model_type="char",
    )  # fmt: skip
    ChatGLMTokenizer(str(folder / "tokenizer.model")).save_pretrained(folder)


GLM_WORDS = 48
"""Size of the tiny ChatGLM's vocabulary, above that of its tokenizer."""


def _make_glm(width: int, layers: int) -> Any:
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig, ChatGLMModel

    config = ChatGLMConfig(
        num_layers=layers, padded_vocab_size=GLM_WORDS, hidden_size=width, ffn_hidden_size=12,
        kv_channels=4, num_attention_heads=width // 4, seq_length=64, multi_query_attention=True,
        multi_query_group_num=1, original_rope=True, add_qkv_bias=True,
    )  # fmt: skip
    model = ChatGLMModel(config)
    for parameter in model.parameters():  # the class leaves them uninitialised
        torch.nn.init.normal_(parameter)
    return model


def make_connectors(folder: Path, **settings: Any) -> None:
    """LTX-2's connectors of ``make_encoder``'s widths and layers."""
    from diffusers.pipelines.ltx2 import LTX2TextConnectors

    sizes = {
        f"{of}_connector_{name}": value
        for of in ("video", "audio")
        for name, value in {
            "num_attention_heads": 2, "attention_head_dim": 4, "num_layers": 1,
            "num_learnable_registers": 5,
        }.items()
    }  # fmt: skip
    given = {"caption_channels": 8, "text_proj_in_factor": 4, **sizes, **settings}
    LTX2TextConnectors(**given).save_pretrained(folder)


DECODERS = (
    "llama", "gemma2", "gemma3", "glm", "qwen3", "qwen3_lm", "qwen_vl", "qwen_vl_text", "mistral",
)  # fmt: skip


def _make_decoder(kind: str, width: int, layers: int) -> Any:
    """Causal language model with ``width`` / 4 heads, and its vision tower or head."""
    said: dict[str, Any] = {
        "vocab_size": len(WORDS), "hidden_size": width, "intermediate_size": 12,
        "num_hidden_layers": layers, "num_attention_heads": width // 4, "num_key_value_heads": 1,
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    }  # fmt: skip
    seen: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    if kind == "llama":
        return transformers.LlamaModel(transformers.LlamaConfig(**said))
    if kind == "gemma2":
        return transformers.Gemma2Model(
            transformers.Gemma2Config(
                **said, head_dim=4, sliding_window=16, query_pre_attn_scalar=4
            )
        )
    if kind == "glm":
        return _make_glm(width, layers)
    if kind == "gemma3":
        of = ("sliding_attention", "full_attention")
        language = {
            "model_type": "gemma3_text", "head_dim": 4, "sliding_window": 4,
            "query_pre_attn_scalar": 4, "layer_types": [of[i % 2] for i in range(layers)], **said,
        }  # fmt: skip
        vision = {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, **seen}
        return transformers.Gemma3ForConditionalGeneration(
            transformers.Gemma3Config(
                text_config=language, vision_config={**vision, "num_hidden_layers": 1},
                mm_tokens_per_image=4,
            )
        )  # fmt: skip
    if kind.startswith("qwen3"):
        qwen3 = transformers.Qwen3Config(**said, head_dim=4)
        lm = kind == "qwen3_lm"
        return (transformers.Qwen3ForCausalLM if lm else transformers.Qwen3Model)(qwen3)
    if kind == "mistral":
        language = {"model_type": "mistral", "head_dim": 4, **said}
        vision = {"model_type": "pixtral", "image_size": 16, "patch_size": 4, **seen}
        return transformers.Mistral3ForConditionalGeneration(
            transformers.Mistral3Config(
                text_config=language, vision_config={**vision, "num_hidden_layers": 1}
            )
        )
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}
    text = transformers.Qwen2_5_VLTextConfig(**said, rope_parameters=rope)
    if kind == "qwen_vl_text":
        return transformers.Qwen2_5_VLTextModel(text)
    vision = {"depth": 1, "num_heads": 2, "out_hidden_size": width, **seen}
    return transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(text_config=text.to_dict(), vision_config=vision)
    )


def make_encoder(
    kind: str, width: int = 8, projection: int = 8, layers: int = 3, positions: int = LENGTH
) -> Any:
    """``clip``, ``projected``, ``t5``, ``umt5``, ``bert``, or one of ``DECODERS``, random, in eval
    mode."""
    if kind in DECODERS:
        return _make_decoder(kind, width, layers).eval()
    if kind == "umt5":
        umt5 = transformers.UMT5Config(
            vocab_size=len(WORDS), d_model=width, d_kv=4, d_ff=12, num_layers=layers, num_heads=2
        )
        return transformers.UMT5EncoderModel(umt5).eval()
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
        num_attention_heads=2, max_position_embeddings=positions, projection_dim=projection,
        eos_token_id=1, bos_token_id=2, pad_token_id=1,
        hidden_act="quick_gelu" if kind == "clip" else "gelu",
    )  # fmt: skip
    if kind == "clip":
        return transformers.CLIPTextModel(clip).eval()
    return transformers.CLIPTextModelWithProjection(clip).eval()


def make_pipeline(folder: Path, *encoders: Any, **index: Any) -> Path:
    """A folder with these encoders: kinds, or (kind, width, projection, layers, positions)."""
    torch.manual_seed(0)
    for i, given in enumerate(encoders):
        kind, sizes = (given, []) if isinstance(given, str) else (given[0], list(given[1:]))
        suffix = f"_{i + 1}" if i else ""
        make_encoder(kind, *sizes).save_pretrained(folder / f"text_encoder{suffix}")
        tokens = "clip" if kind == "projected" else kind
        length = LENGTH if len(sizes) < 4 else sizes[3]
        make_tokenizer(folder / f"tokenizer{suffix}", tokens, length)
        if kind == "gemma3":
            make_connectors(folder / "connectors")
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
