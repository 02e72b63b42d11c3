"""A small UNet as diffusers' folders have it, sound and otherwise."""

import json
import shutil

import torch

TINY = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "cross_attention_dim": 6,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
}

EPSILON = ["--objective", "epsilon", "--noise-schedule", "scaled_linear"]


def make_folder(root):
    """A pipeline's folder with a small UNet and a scheduler."""
    from diffusers import DDPMScheduler, UNet2DConditionModel

    torch.manual_seed(0)
    UNet2DConditionModel(**TINY).save_pretrained(root / "unet", max_shard_size="100KB")
    DDPMScheduler(prediction_type="v_prediction").save_pretrained(root / "scheduler")
    return root


def damaged(folder, tmp_path, change):
    """A copy of the UNet with one file of weights, changed."""
    from safetensors.torch import save_file

    from megatron_pulse.diffusion.published import read_folder

    copy = tmp_path / "damaged"
    copy.mkdir()
    shutil.copy(folder / "unet" / "config.json", copy)
    tensors = dict(read_folder(folder / "unet"))
    change(tensors)
    save_file(tensors, copy / "diffusion_pytorch_model.safetensors")
    return copy


def sharded(folder, root, change=lambda weight_map: None, **settings):
    """A copy of the UNet in shards, with other ``settings``, whose index ``change`` alters."""
    shutil.copytree(folder / "unet", root)
    index, config = next(root.glob("*.index.json")), root / "config.json"
    content = json.loads(index.read_text())
    change(content["weight_map"])
    index.write_text(json.dumps(content))
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    return root


def importing(source, tmp_path, *flags):
    return ["import", "--from", str(source), "--to", str(tmp_path / "checkpoint"), *flags]
