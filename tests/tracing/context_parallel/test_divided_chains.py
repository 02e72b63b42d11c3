"""Derived chains whose tokens are divided over ranks: values, gradients, traffic, refusals."""

from __future__ import annotations

import json

import pytest
import torch

import megatron_pulse as pulse
from megatron_pulse.backbone.token_shares import share_of
from megatron_pulse.cli.models.context_report import context_report
from megatron_pulse.errors import Faults
from megatron_pulse.tracing.cache.serialize import from_record, to_record
from megatron_pulse.tracing.context_parallel.divided_backbone import divide_context, traffic_of
from megatron_pulse.tracing.context_parallel.divided_chain import divide_chain
from megatron_pulse.tracing.context_parallel.division import Division, token_order
from megatron_pulse.tracing.from_module import source_of
from tests.ranks import run_ranks
from tests.tracing.context_parallel.modules import (
    Blocks,
    Pooled,
    ThreeHeadsCausal,
    ThreeHeadsWithBias,
    given,
)
from tests.tracing.context_parallel.ranks import Compared, compare, wait_alone
from tests.tracing.subject import Subject
from tests.tracing.zoo.declared import TINY

FP32, FP64 = "float32", "float64"
IN_FP32 = {"chrono_edit", "cosmos", "hunyuan_image", "hunyuan_video15", "kandinsky5", "krea2",
           "lumina2", "motif", "skyreels", "vace", "wan_5b", "z_image"}  # fmt: skip
"""Declared classes that compute in fp32, whatever their dtype."""
ROUNDED = {"kandinsky5": 4e-3}
"""Classes that round queries and keys to bf16, whatever their dtype."""
REFUSED = {"hidream": "depends on data", "sana_video": "queries are not", "i2vgen": "UNets are not",
           "latte": "reshape.default of temporal"}  # fmt: skip
"""Declared classes whose tokens are not divided, and why."""
QUICK = {
    2: (("mixed", FP64), ("flux", FP64), ("three_heads", FP64), ("three_heads", FP32)),
    3: (("mixed", FP64),),
    4: (("three_heads", FP64), ("mixed", FP64), ("cogvideox_2b_of_4_heads", FP64)),
}
OTHERS = {
    2: (
        *(("wan/shapes", FP32), ("flux", FP32), ("wan_i2v", FP32), ("hunyuan", FP32)),
        *(("ltx", FP32), ("ltx", FP64)),
        *(("hunyuan_video", FP64), ("cogvideox_5b", FP64), ("sd3", FP64), ("t5", FP64)),
        ("pixart_alpha", FP64),
        *((name, FP32 if name in IN_FP32 else FP64) for name in sorted(TINY.keys() - REFUSED)),
    ),
    4: (("wan_of_4_heads", FP32), ("flux_of_4_heads", FP64), ("ltx_of_4_heads", FP64),
        ("hunyuan_video_of_4_heads", FP64)),
}  # fmt: skip


@pytest.mark.parametrize("size", QUICK)
def test_ranks_equal_one_process_and_send_what_the_formula_says(size: int) -> None:
    """6 text tokens over 4 ranks, and 7 tokens of "mixed", are uneven shares.

    8 and 4 heads over 3 ranks, and 3 heads over others, need rings.
    """
    _require_equal(size, QUICK[size])


SLICED = {2: (("flux", FP64), ("wan", FP32)), 3: (("mixed", FP64), ("three_heads", FP64))}


@pytest.mark.parametrize("size", SLICED)
def test_ranks_in_slices_of_their_tokens_equal_one_process(size: int) -> None:
    """Two or three slices, uneven ones among them; rings and all-to-alls."""
    _require_equal(size, SLICED[size], 5 - size)


@pytest.mark.parametrize("name", REFUSED)
def test_declared_classes_that_cannot_be_divided_say_why(name: str) -> None:
    with pytest.raises(Faults, match=REFUSED[name]):
        divide_context(Subject(name, "float32").chain, 0, 2)


@pytest.mark.parametrize("size", OTHERS)
def test_further_classes_equal_one_process(size: int) -> None:
    _require_equal(size, OTHERS[size])


def _require_equal(size: int, chains: tuple[tuple[str, str], ...], token_slices: int = 1) -> None:
    every = run_ranks(size, compare, chains, token_slices, timeout_s=500)
    assert set(every[0]) == set(chains)
    faults = [
        f"{name} {dtype}: {fault}"
        for of_rank in every
        for (name, dtype), found in of_rank.items()
        for fault in _faults(found, ROUNDED.get(name, 1e-12 if dtype == FP64 else 2e-6))
    ]
    assert not faults


def _faults(found: Compared, tolerance: float) -> list[str]:
    worst = max(found.gradients, key=lambda name: found.gradients[name])
    checked = {
        f"output differs by {found.output:.1e}": found.output < tolerance,
        f"gradient of {worst} by {found.gradients[worst]:.1e}": found.gradients[worst] < tolerance,
        f"sent {found.sent}, predicted {found.predicted}": found.sent[0] > 0
        and found.sent == pytest.approx(found.predicted),
    }
    return [fault for fault, holds in checked.items() if not holds]


def test_shares_of_tokens() -> None:
    assert [share_of(226, rank, 4) for rank in range(4)] == [
        (0, 57),
        (57, 57),
        (114, 56),
        (170, 56),
    ]
    division = Division(1, (5, 7))
    assert division.counts(2) == (7, 5)
    assert division.own_shape((2, 12, 3), 1, 2) == (2, 5, 3)
    order = token_order((5, 7), 2, torch.device("cpu")).tolist()
    assert order == [0, 1, 2, 5, 6, 7, 8, 3, 4, 9, 10, 11]


def test_boundaries_have_a_rank_s_tokens_and_inputs_are_whole() -> None:
    chain = Subject("cogvideox_2b", "float32").chain
    shares = [divide_context(chain, rank, 2) for rank in (0, 1)]
    between = [layer.inputs for layer in shares[0].layers if layer.name == "transformer_blocks.1"]
    assert {spec.shape[0] for spec in between[0]} == {3, 24}
    for share in shares:
        assert share.input_spec == chain.input_spec and share.output_spec == chain.output_spec
        assert share.batch_fields == chain.batch_fields and share.record == chain.record


def test_what_cannot_be_divided_is_refused_with_its_line() -> None:
    for block, said in (
        (Pooled, "mean.dim of blocks.0"),
        (ThreeHeadsCausal, "its 3 heads do not divide over 2 ranks, and ring attention has no"),
        (ThreeHeadsWithBias, "ring attention takes boolean masks alone"),
    ):
        chain = pulse.from_module(Blocks(block), given(2), sample="sample")
        with pytest.raises(Faults, match=rf"(?s){said}.*") as raised:
            divide_context(chain, 0, 2)
        assert "modules.py:" in str(raised.value)
    with pytest.raises(Faults, match="UNets are not divided"):
        divide_context(Subject("small_unet", "float32").chain, 0, 2)


def test_traffic_of_an_attention_is_four_times_its_queries() -> None:
    traffic = traffic_of(Subject("wan", "float32").chain, 2)
    attention = [each for each in traffic if each.num_attentions]
    assert [each.all_to_all for each in attention] == [4 * 48 * 24 * 4] * 3
    assert attention[0].sent_per_rank(2) == 4 * 48 * 24
    assert [each.layer for each in traffic if each.gathered] == ["proj_out"]
    assert [each.tokens for each in traffic if each.layer.startswith("blocks")] == [(48,)] * 9


def test_traffic_of_a_ring_is_its_keys_and_values_and_backward_their_gradients_too() -> None:
    chain = Subject("three_heads", "float32").chain
    attention = [each for each in traffic_of(chain, 4) if each.num_attentions]
    assert [(each.num_rings, each.all_to_all, each.ring) for each in attention] == [
        (1, 0, 2 * 7 * 12 * 4)
    ] * 2
    assert attention[0].sent_per_rank(4) == 3 / 4 * attention[0].ring
    assert attention[0].sent_per_rank(4, backward=True) == 2 * 3 / 4 * attention[0].ring
    lines, record = context_report(chain, 4)
    assert lines[-1].startswith("2 attentions by a ring of keys and values; ")
    assert sum(row["num_rings"] for row in record["links"]) == 2


def test_the_report_says_what_is_divided_and_sent_or_refused() -> None:
    lines, record = context_report(Subject("ltx", "float32").chain, 2)
    assert "divided from hidden_states on, 12 tokens" in lines[0]
    assert [row["sent"] for row in record["links"] if row["num_attentions"]] == [4 * 12 * 32] * 3
    lines, record = context_report(Subject("small_unet", "float32").chain, 2)
    assert lines[0].endswith("is refused (2 faults):") and len(record["refused"]) == len(lines) - 1


def test_a_stored_chain_is_divided_alike() -> None:
    source = source_of(Subject("ltx", "float32").chain)
    assert source is not None
    chain, module = source.chains.first, source.chains.module
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    stored = from_record(json.loads(json.dumps(to_record(chain, own))), own)
    made, again = (divide_chain(each, 1, 2) for each in (chain, stored))
    assert made.divisions == again.divisions and made.divided == again.divided
    for one, other in zip(made.graphs, again.graphs, strict=True):
        assert str(one.graph) == str(other.graph)


def test_sizes_that_depend_on_data_are_refused() -> None:
    with pytest.raises(Faults, match=r"cat.default of transformer_blocks.0.*depends on data"):
        divide_context(Subject("mochi", "float32").chain, 0, 2)


def test_a_wait_that_takes_too_long_names_the_ranks() -> None:
    assert run_ranks(2, wait_alone)[0].startswith("all-to-all of the context-parallel ranks [0, 1]")
