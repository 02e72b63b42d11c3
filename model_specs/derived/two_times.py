"""Wan 2.2's 5B with a given first frame: time 0 for its tokens, the sample's for the others.

The class takes a time for every token, whose modulation is six values as large as the hidden
states. Here the modulation of two times is sent, and each use spreads it over the tokens. The loss
of given frames has no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def with_given_frames(num_frames: int) -> Callable[[Any], Callable[..., Any]]:
    """Wrapper of ``WanTransformer3DModel`` whose first frames are those of ``image_latent``."""

    def around(module: Any) -> Callable[..., Any]:
        for block in module.blocks:
            block.forward = functools.partial(_block, block)
        return functools.partial(_forward, module, num_frames)

    return around


def _forward(
    module: Any,
    num_frames: int,
    *,
    hidden_states: Any,
    timestep: Any,
    encoder_hidden_states: Any,
    image_latent: Any,
) -> Any:
    import torch

    patch = module.config.patch_size
    known, noisy = image_latent[:, :, :num_frames], hidden_states[:, :, num_frames:]
    hidden_states = torch.cat([known, noisy], 2)
    sides = [n // p for n, p in zip(hidden_states.shape[2:], patch, strict=True)]
    num_known = num_frames // patch[0] * sides[1] * sides[2]
    rotary = module.rope(hidden_states)
    x = module.patch_embedding(hidden_states).flatten(2).transpose(1, 2).contiguous()
    times = torch.stack([torch.zeros_like(timestep), timestep], 1).flatten()
    embedded, modulation, text, _ = module.condition_embedder(
        times, encoder_hidden_states, None, timestep_seq_len=2
    )
    modulation = modulation.unflatten(2, (6, -1))
    for block in module.blocks:
        x = block(x, text, modulation, rotary, num_known)
    parts = (module.scale_shift_table.unsqueeze(0) + embedded.unsqueeze(2)).chunk(2, dim=2)
    shift, scale = (_spread(part.squeeze(2), num_known, x.shape[1]) for part in parts)
    x = (module.norm_out(x.float()) * (1 + scale) + shift).type_as(x)
    x = module.proj_out(x).unflatten(2, (*patch, -1)).unflatten(1, sides)
    x = x.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6).flatten(4, 5).flatten(2, 3)
    return torch.cat([x[:, :, :num_frames].detach(), x[:, :, num_frames:]], 2)


def _block(
    block: Any,
    hidden_states: Any,
    encoder_hidden_states: Any,
    temb: Any,
    rotary_emb: Any,
    num_known: int,
) -> Any:
    """A block of the class, whose modulation ``temb`` is [b, 2, 6, C]."""
    x, length = hidden_states, hidden_states.shape[1]
    parts = (block.scale_shift_table.unsqueeze(0) + temb.float()).chunk(6, dim=2)
    two = [part.squeeze(2) for part in parts]
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = (
        functools.partial(_spread, part, num_known, length) for part in two
    )
    given = (block.norm1(x.float()) * (1 + scale()) + shift()).type_as(x)
    attended = block.attn1(given, None, None, rotary_emb)
    x = (x.float() + attended * gate()).type_as(x)
    x = x + block.attn2(block.norm2(x.float()).type_as(x), encoder_hidden_states, None, None)
    given = (block.norm3(x.float()) * (1 + mlp_scale()) + mlp_shift()).type_as(x)
    return (x.float() + block.ffn(given).float() * mlp_gate()).type_as(x)


def _spread(value: Any, num_known: int, length: int) -> Any:
    """[b, 2, C] over ``length`` tokens, the first ``num_known`` of which are given."""
    import torch

    known, others = value.split(1, 1)
    parts = known.expand(-1, num_known, -1), others.expand(-1, length - num_known, -1)
    return torch.cat(parts, 1)
