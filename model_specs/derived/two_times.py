"""Given first frames of Wan 2.2's 5B and of LTX: time 0 for their tokens, the sample's for others.

The classes take a time for every token, whose modulation is six values as large as the hidden
states. Here the modulation of two times is sent, and each use spreads it over the tokens. The loss
of given frames has no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def with_given_frames(num_frames: int) -> Callable[[Any], Callable[..., Any]]:
    """Wrapper of ``WanTransformer3DModel`` whose first frames are those of ``image_latent``."""
    return _wrapper("blocks", _block, _forward, num_frames)


def _wrapper(
    blocks: str, of_block: Callable[..., Any], forward: Callable[..., Any], num_frames: int
) -> Callable[[Any], Callable[..., Any]]:
    """Wrapper that runs a module's ``blocks`` by ``of_block``, and the whole by ``forward``."""

    def around(module: Any) -> Callable[..., Any]:
        for block in getattr(module, blocks):
            block.forward = functools.partial(of_block, block)
        return functools.partial(forward, module, num_frames)

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


def ltx_with_given_frames(num_frames: int) -> Callable[[Any], Callable[..., Any]]:
    """Wrapper of ``LTXVideoTransformer3DModel`` whose first frames are those of ``image_latent``.

    Unlike the class it takes and returns latents.
    """
    return _wrapper("transformer_blocks", _ltx_block, _ltx_forward, num_frames)


def _ltx_forward(
    module: Any,
    num_known_frames: int,
    *,
    hidden_states: Any,
    timestep: Any,
    encoder_hidden_states: Any,
    encoder_attention_mask: Any,
    image_latent: Any,
    num_frames: int,
    height: int,
    width: int,
    rope_interpolation_scale: Any,
) -> Any:
    import torch

    known, noisy = image_latent[:, :, :num_known_frames], hidden_states[:, :, num_known_frames:]
    x = torch.cat([known, noisy], 2).flatten(2).mT
    num_known, count = num_known_frames * height * width, len(x)
    rotary = module.rope(x, num_frames, height, width, rope_interpolation_scale, None)
    bias = ((1 - encoder_attention_mask.to(x.dtype)) * -10000.0).unsqueeze(1)
    x = module.proj_in(x)
    times = torch.stack([torch.zeros_like(timestep), timestep], 1).flatten()
    modulation, embedded = module.time_embed(times, batch_size=count, hidden_dtype=x.dtype)
    modulation = modulation.unflatten(0, (count, 2)).unflatten(2, (6, -1))
    text = module.caption_projection(encoder_hidden_states)
    for block in module.transformer_blocks:
        x = block(x, text, modulation, rotary, bias, num_known)
    embedded = embedded.unflatten(0, (count, 2))
    parts = (module.scale_shift_table + embedded.unsqueeze(2)).unbind(2)
    shift, scale = (_spread(part, num_known, x.shape[1]) for part in parts)
    x = module.proj_out(module.norm_out(x) * (1 + scale) + shift)
    x = x.mT.unflatten(2, (num_frames, height, width))
    return torch.cat([x[:, :, :num_known_frames].detach(), x[:, :, num_known_frames:]], 2)


def _ltx_block(
    block: Any,
    hidden_states: Any,
    encoder_hidden_states: Any,
    temb: Any,
    rotary_emb: Any,
    encoder_attention_mask: Any,
    num_known: int,
) -> Any:
    """A block of the class, whose modulation ``temb`` is [b, 2, 6, C]."""
    x, length = hidden_states, hidden_states.shape[1]
    two = (block.scale_shift_table + temb).unbind(2)
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = (
        functools.partial(_spread, part, num_known, length) for part in two
    )
    given = block.norm1(x) * (1 + scale()) + shift()
    x = x + block.attn1(hidden_states=given, image_rotary_emb=rotary_emb) * gate()
    x = x + block.attn2(
        x, encoder_hidden_states=encoder_hidden_states, attention_mask=encoder_attention_mask
    )
    return x + block.ff(block.norm2(x) * (1 + mlp_scale()) + mlp_shift()) * mlp_gate()


def _spread(value: Any, num_known: int, length: int) -> Any:
    """[b, 2, C] over ``length`` tokens, the first ``num_known`` of which are given."""
    import torch

    known, others = value.split(1, 1)
    parts = known.expand(-1, num_known, -1), others.expand(-1, length - num_known, -1)
    return torch.cat(parts, 1)
