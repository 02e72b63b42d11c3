"""Reference pictures, whose tokens follow the noisy ones: the numbers of diffusers' pipelines."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from PIL import Image

from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import Objective
from megatron_pulse.diffusion.sampling import sample
from megatron_pulse.tracing.from_module import with_weights
from megatron_pulse.tracing.initial_weights.sources import from_module_itself
from model_specs import load_backbone
from tests.model_specs.chains import build_chain

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": (
        "FluxTransformer2DModel",
        {
            **HEADS, "in_channels": 16, "num_single_layers": 1, "joint_attention_dim": 12,
            "pooled_projection_dim": 8, "guidance_embeds": True, "axes_dims_rope": (4, 4, 8),
        },
    ),
    "flux2": (
        "Flux2Transformer2DModel",
        {
            **HEADS, "in_channels": 16, "num_single_layers": 1, "joint_attention_dim": 12,
            "timestep_guidance_channels": 16, "axes_dims_rope": (4, 4, 4, 4),
        },
    ),
    "qwen": (
        "QwenImageTransformer2DModel",
        {
            **HEADS, "in_channels": 16, "out_channels": 4, "joint_attention_dim": 12,
            "axes_dims_rope": (4, 6, 6),
        },
    ),
}  # fmt: skip
"""Classes and configs; latents are of 4 x 6, Flux.2's of 2 x 3."""


def pair(name: str) -> tuple[Any, Any]:
    """diffusers' module and our chain of its weights."""
    kind, config = CASES[name]
    torch.manual_seed(0)
    module = getattr(diffusers, kind)(**config).eval()
    sides = (2, 3) if name == "flux2" else (4, 6)
    sizes = {"height": sides[0], "width": sides[1], "text_length": 5, "reference": 1}
    given = {key: [*v] if isinstance(v, tuple) else v for key, v in config.items()}
    backbone = load_backbone(f"diffusers:{kind}", {**given, **sizes})
    return module, build_chain(with_weights(backbone, from_module_itself(module)))


def of_pipeline(name: str, module: Any, noisy: Any, fields: Any) -> torch.Tensor:
    """Prediction with the tokens and positions that the pipeline makes."""
    batch, channels, height, width = noisy.shape
    parts: Any = {"timestep": fields["timesteps"] / 1000, "return_dict": False}
    text = {"encoder_hidden_states": fields["context"]}
    reference = fields["reference_image"]
    if name == "flux2":
        pipeline = diffusers.Flux2Pipeline
        tokens = [pipeline._pack_latents(each) for each in (noisy, reference)]
        made = pipeline._prepare_latent_ids(noisy), pipeline._prepare_image_ids([reference[:1]])
        ids = [each.expand(batch, -1, -1) for each in made]
        parts |= {
            "img_ids": torch.cat(ids, 1), "txt_ids": pipeline._prepare_text_ids(fields["context"]),
            "guidance": fields["guidance"],
        }  # fmt: skip
        predicted = module(hidden_states=torch.cat(tokens, 1), **text, **parts)[0]
        cut: torch.Tensor = predicted[:, : tokens[0].shape[1]]
        return cut.mT.unflatten(2, (height, width))
    of = diffusers.FluxKontextPipeline if name == "flux" else diffusers.QwenImageEditPipeline
    tokens = [of._pack_latents(x, batch, channels, height, width) for x in (noisy, reference)]
    if name == "flux":
        places = of._prepare_latent_image_ids(1, height // 2, width // 2, "cpu", torch.float32)
        others = places.clone()
        others[..., 0] = 1
        parts |= {
            "img_ids": torch.cat([places, others]), "txt_ids": torch.zeros(5, 3),
            "guidance": fields["guidance"], "pooled_projections": fields["pooled"],
        }  # fmt: skip
    else:
        parts["img_shapes"] = [[(1, height // 2, width // 2)] * 2] * batch
        parts["encoder_hidden_states_mask"] = fields["context_mask"]
    predicted = module(hidden_states=torch.cat(tokens, 1), **text, **parts)[0]
    cut = of._unpack_latents(predicted[:, : tokens[0].shape[1]], 8 * height, 8 * width, 8)
    return cut if name == "flux" else cut.squeeze(2)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", CASES)
def test_predictions_and_gradients_are_those_of_the_pipeline_s_tokens(name: str) -> None:
    module, chain = pair(name)
    readers = [x.name for x in chain.backbone.layers if "reference_image" in x.uses]
    assert len(readers) == 1
    assert chain.backbone.input_spec == chain.backbone.output_spec
    noisy, fields = chain.batch(2)
    fields = {**fields, "reference_image": torch.randn_like(noisy)}
    if name == "qwen":
        fields["context_mask"] = torch.ones(2, 5, dtype=torch.bool)
    noisy.requires_grad_()
    ours, theirs = chain(noisy, fields), of_pipeline(name, module, noisy, fields)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    factors = torch.randn(ours.shape, generator=torch.Generator().manual_seed(3))
    gradients = [torch.autograd.grad((x * factors).sum(), noisy)[0] for x in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)
    other = {**fields, "reference_image": -fields["reference_image"]}
    assert (chain(noisy, other) - ours).abs().max() > 1e-4


@pytest.mark.usefixtures("one_rank")
def test_pictures_of_qwen_image_edit_are_those_of_the_pipeline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its text states, of prompt and picture, are given."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit

    module, chain = pair("qwen")
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.5, 2.0, 1.0, 0.5],
    ).eval()  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    names = ("text_encoder", "tokenizer", "processor")
    pipeline = diffusers.QwenImageEditPipeline(
        vae=vae, transformer=module, scheduler=scheduler, **dict.fromkeys(names)
    )
    pipeline.set_progress_bar_config(disable=True)
    monkeypatch.setattr(edit, "calculate_dimensions", lambda *_: (48, 32, None))
    pixels = torch.randint(256, (32, 48, 3), generator=torch.Generator().manual_seed(0)).byte()
    image = Image.fromarray(pixels.numpy())
    noise, text = torch.randn(1, 4, 4, 6), torch.randn(1, 5, 12)
    theirs = pipeline(
        image=image, height=32, width=48, num_inference_steps=3, true_cfg_scale=1.0,
        latents=pipeline._pack_latents(noise, 1, 4, 4, 6), prompt_embeds=text,
        prompt_embeds_mask=torch.ones(1, 5, dtype=torch.int64), output_type="latent",
    ).images  # fmt: skip
    seen = pipeline.image_processor.preprocess(image, 32, 48).unsqueeze(2)
    reference = pipeline._encode_vae_image(seen, None).squeeze(2)
    ours = sample(
        lambda x, t, fields: chain(x, {"timesteps": t, **fields}),
        DiffusionProcess(Objective.FLOW, shift=3.0),
        (4, 4, 6),
        1,
        {"context": text, "context_mask": torch.ones(1, 5, dtype=torch.bool),
         "reference_image": reference},
        num_steps=3,
        noises=iter([noise]),
        progress=False,
    )  # fmt: skip
    theirs = pipeline._unpack_latents(theirs, 32, 48, 8).squeeze(2)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
