"""The parts that blocks are made of."""

import pytest
import torch

from model_specs.common import attention
from model_specs.common.attention import BiasColumnParallelLinear
from model_specs.common.megatron_config import transformer_config, uniform_init
from tests.model_specs.chains import make_context

SIZES = {"hidden_size": 48, "num_attention_heads": 3, "ffn_hidden_size": 96}


def test_transformer_engine_only_where_it_is_asked_for_and_imports(monkeypatch, one_rank):
    for asked, imports, expected in (
        ("local", True, BiasColumnParallelLinear),
        ("transformer_engine", False, BiasColumnParallelLinear),
        ("transformer_engine", True, attention.TEColumnParallelLinear),
    ):
        config = make_context().config
        config.transformer_impl = asked
        monkeypatch.setattr(attention, "HAVE_TE", imports)
        assert attention.parts(config).column is expected


def test_a_familys_config_is_its_own(one_rank):
    """Sizes are the family's, parallelism and dtype the run's; the run's config stays as it was."""
    base = make_context(torch.bfloat16).config
    before = dict(vars(base))
    config = transformer_config(base, **SIZES, init_method=uniform_init, gated_linear_unit=True)
    assert vars(base) == before
    assert (config.kv_channels, config.num_query_groups) == (16, 3)
    assert config.output_layer_init_method is config.init_method is uniform_init
    assert config.params_dtype == torch.bfloat16
    assert config.hidden_dropout == config.attention_dropout == 0
    assert config.gated_linear_unit and not config.bias_activation_fusion


def test_every_reason_against_a_layout_is_given(one_rank):
    base = make_context().config
    base.tensor_model_parallel_size = 5
    with pytest.raises(ValueError, match="(?s)heads 3 .*width 96 "):
        transformer_config(base, **SIZES, init_method=uniform_init)


def test_attention_takes_no_mask_but_of_the_keys_of_another_sequence(one_rank):
    from megatron.core.transformer.enums import AttnMaskType

    config = transformer_config(make_context().config, **SIZES, init_method=uniform_init)
    for mask_type, kind in ((AttnMaskType.causal, "cross"), (AttnMaskType.padding, "self")):
        with pytest.raises(ValueError, match="masks of cross-attention keys only"):
            attention.SdpaCoreAttention(config, 1, mask_type, kind)
    core = attention.SdpaCoreAttention(config, 1, AttnMaskType.no_mask, "cross")
    query, key = torch.randn(5, 2, 3, 16), torch.randn(7, 2, 3, 16)
    assert core(query, key, key, None).shape == (5, 2, 48)
    with pytest.raises(ValueError, match="takes no mask in this layer"):
        core(query, key, key, torch.zeros(2, 1, 1, 7, dtype=torch.bool))
    core = attention.SdpaCoreAttention(config, 1, AttnMaskType.padding, "cross")
    for mask in (None, torch.zeros(2, 1, 5, 7, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"needs a key mask of shape \[2, 1, 1, 7\]"):
            core(query, key, key, mask)


def test_masked_attention_is_attention_over_the_keys_that_are_left(one_rank):
    """A sample whose mask leaves nothing attends to everything."""
    from megatron.core.transformer.enums import AttnMaskType

    config = transformer_config(make_context().config, **SIZES, init_method=uniform_init)
    free = attention.SdpaCoreAttention(config, 1, AttnMaskType.no_mask, "cross")
    core = attention.SdpaCoreAttention(config, 1, AttnMaskType.padding, "cross")
    query, key, value = torch.randn(5, 3, 3, 16), torch.randn(7, 3, 3, 16), torch.randn(7, 3, 3, 16)
    mask = torch.tensor([[1, 1, 0, 1, 0, 0, 0], [1] * 7, [0] * 7])
    together = core(query, key, value, attention.left_out(mask))
    for sample, keys in enumerate(([0, 1, 3], range(7), range(7))):
        one = slice(sample, sample + 1)
        alone = free(query[:, one], key[list(keys), one], value[list(keys), one])
        assert torch.allclose(together[:, one], alone, atol=1e-6)
