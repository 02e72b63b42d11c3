"""diffusers' modules of the families' configurations, called with what our chains take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from torch import Tensor

import megatron_pulse as pulse
import model_specs
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.tracing.input_leaves import leaves_of

Fields = Mapping[str, Tensor]


class Twin:
    """The module that published a configuration; dropout of labels, the data's business here, is
    off."""

    def __init__(self, backbone: Backbone, dtype: torch.dtype) -> None:
        self.published = model_specs.published_form(backbone)
        assert self.published is not None
        self._class_name = self.published.class_name
        module = getattr(diffusers, self._class_name)(**self.published.config)
        self.module = module.to(dtype).train(self._class_name != "DiTTransformer2DModel")

    def given(self, image: Tensor, fields: Fields) -> dict[str, Any]:
        """Arguments of the module for a microbatch of our chain."""
        return _GIVEN[self._class_name](self.module.config, image, fields)

    def derive(self, image: Tensor, fields: Fields) -> Backbone:
        """The module as a chain, exported for such a microbatch."""
        return pulse.from_module(self.module, self.given(image, fields))

    def batch(self, image: Tensor, fields: Fields) -> tuple[Tensor, dict[str, Tensor]]:
        """A microbatch of our chain as one of the derived chain."""
        leaves = leaves_of(self.given(image, fields))
        sample = leaves.pop("sample" if "sample" in leaves else "hidden_states")
        leaves["timesteps"] = leaves.pop("timestep")
        return sample, leaves

    def unpacked(self, prediction: Tensor, image: Tensor) -> Tensor:
        """A prediction of the module's, in the shape of our chain's."""
        return _unpacked(self.module, prediction, image)

    def __call__(self, image: Tensor, fields: Fields) -> Tensor:
        """The module's prediction, in the shape of our chain's."""
        return call(self.module, image, fields)


def call(module: Any, image: Tensor, fields: Fields) -> Tensor:
    """The prediction of a module of diffusers', in the shape of our chain's."""
    given = _GIVEN[type(module).__name__](module.config, image, fields)
    (prediction, *_) = module(**given, return_dict=False)
    return _unpacked(module, prediction, image)


def _unpacked(module: Any, prediction: Tensor, image: Tensor) -> Tensor:
    if type(module).__name__ == "DiTTransformer2DModel":
        return _placed(prediction, module.config.patch_size, *image.shape[-2:])
    if type(module).__name__ != "FluxTransformer2DModel":
        return prediction
    height, width = image.shape[-2:]
    found: Tensor = diffusers.FluxPipeline._unpack_latents(prediction, 8 * height, 8 * width, 8)
    return found


def _placed(prediction: Tensor, patch: int, height: int, width: int) -> Tensor:
    """A prediction of DiT's, whose patches diffusers places in a square for any size."""
    side = prediction.shape[-1] // patch
    patches = prediction.unflatten(3, (side, patch)).unflatten(2, (side, patch))
    in_order = patches.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    grid = in_order.unflatten(1, (height // patch, width // patch))
    return grid.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def _unet(config: Any, image: Tensor, fields: Fields) -> dict[str, Any]:
    given = {
        "sample": image,
        "timestep": fields["timesteps"],
        "encoder_hidden_states": fields["context"],
    }
    if "labels" in fields:
        given["class_labels"] = fields["labels"]
    if "pooled" in fields:
        added = {"text_embeds": fields["pooled"], "time_ids": fields["time_ids"]}
        return {**given, "added_cond_kwargs": added}
    return given


def _hunyuan(config: Any, image: Tensor, fields: Fields) -> dict[str, Any]:
    from diffusers.pipelines.hunyuandit import pipeline_hunyuandit  # a slow import

    height, width = image.shape[-2:]
    grid = height // config.patch_size, width // config.patch_size
    base = 512 // 8 // config.patch_size
    region = pipeline_hunyuandit.get_resize_crop_region_for_grid(grid, base)
    given = {
        "hidden_states": image,
        "timestep": fields["timesteps"].to(image.dtype),
        "encoder_hidden_states": fields["context"],
        "text_embedding_mask": fields["context_mask"],
        "encoder_hidden_states_t5": fields["context_t5"],
        "text_embedding_mask_t5": fields["context_t5_mask"],
        "image_rotary_emb": get_2d_rotary_pos_embed(
            config.attention_head_dim, region, grid, output_type="pt"
        ),
    }
    if config.use_style_cond_and_image_meta_size:
        given["image_meta_size"] = fields["image_meta_size"].to(image.dtype)
        given["style"] = torch.zeros(len(image), dtype=torch.int64)
    return given


def _dit(config: Any, image: Tensor, fields: Fields) -> dict[str, Any]:
    labels = fields["labels"]
    return {"hidden_states": image, "timestep": fields["timesteps"], "class_labels": labels}


def _pixart(config: Any, image: Tensor, fields: Fields) -> dict[str, Any]:
    return {
        "hidden_states": image,
        "encoder_hidden_states": fields["context"],
        "timestep": fields["timesteps"],
        "added_cond_kwargs": {n: fields.get(n) for n in ("resolution", "aspect_ratio")},
        "encoder_attention_mask": fields["context_mask"],
    }


def _sd3(config: Any, image: Tensor, fields: Fields) -> dict[str, Any]:
    return {
        "hidden_states": image,
        "encoder_hidden_states": fields["context"],
        "pooled_projections": fields["pooled"],
        "timestep": fields["timesteps"],
    }


def _flux(config: Any, image: Tensor, fields: Fields) -> dict[str, Any]:
    """Preparation by ``FluxPipeline`` before the transformer."""
    b, c, h, w = image.shape
    make_ids = diffusers.FluxPipeline._prepare_latent_image_ids
    ids = make_ids(b, h // 2, w // 2, image.device, image.dtype)
    given = {
        "hidden_states": diffusers.FluxPipeline._pack_latents(image, b, c, h, w),
        "encoder_hidden_states": fields["context"],
        "pooled_projections": fields["pooled"],
        "timestep": fields["timesteps"] / 1000,
        "img_ids": ids,
        "txt_ids": ids.new_zeros(fields["context"].shape[1], 3),
    }
    return {**given, "guidance": fields["guidance"]} if "guidance" in fields else given


_GIVEN: dict[str, Callable[[Any, Tensor, Fields], dict[str, Any]]] = {
    "UNet2DConditionModel": _unet,
    "HunyuanDiT2DModel": _hunyuan,
    "DiTTransformer2DModel": _dit,
    "PixArtTransformer2DModel": _pixart,
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
}
