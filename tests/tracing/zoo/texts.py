"""transformers' text encoders."""

from __future__ import annotations

from tests.tracing.zoo.draw import Made, mask, whole


def clip() -> Made:
    import transformers

    config = transformers.CLIPTextConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=16, projection_dim=32, bos_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    return transformers.CLIPTextModel(config), lambda b: {"input_ids": whole(b, 16, below=99)}


def t5() -> Made:
    import transformers

    config = transformers.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return transformers.T5EncoderModel(config), lambda b: {
        "input_ids": whole(b, 12, below=99),
        "attention_mask": mask(b, 12),
    }
