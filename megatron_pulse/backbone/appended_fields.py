"""Batch fields that the first layer appends to the noisy sample, along its channels or tokens.

They are never noised and have no part in the loss. Every device of a first stage reads them from
its own data loader, as all batch fields; no message carries them.

===================  ============================================================================
``inpaint_mask``     1 where the picture is drawn anew, 0 elsewhere: ``[1, h, w]``, the nearest
                     pixel of each latent; FLUX.1-Fill takes all pixels as channels
``masked_image``     the picture, grey where it is drawn anew, as a sample ``[c, h, w]``
``known_mask``       1 for given frames: ``[r, f, h, w]`` of Wan, whose latents span r frames
``known_video``      the video with given frames and grey ones elsewhere, as a sample
``image_latent``     the first frame as a latent, for every frame of the sample (SVD) or followed
                     by zeros (CogVideoX, HunyuanVideo)
``reference_image``  another picture as a sample, whose tokens follow the noisy ones (FLUX.1
                     Kontext, Flux.2, Qwen-Image-Edit)
===================  ============================================================================
"""

from __future__ import annotations

INPAINT_MASK = "inpaint_mask"
MASKED_IMAGE = "masked_image"
KNOWN_MASK = "known_mask"
KNOWN_VIDEO = "known_video"
IMAGE_LATENT = "image_latent"
REFERENCE_IMAGE = "reference_image"
IMAGE_EMBEDDING = "image_embedding"
"""Field of SVD beside these: the first frame as CLIP's vision encoder embeds it, ``[1, width]``."""
CLIP_STATES = "encoder_hidden_states_image"
"""Field of Wan 2.1 beside these: states of the first frame before CLIP's last vision layer."""
SIGLIP_STATES = "image_embeds"
"""Field of HunyuanVideo 1.5 beside these: last states of the first frame in SigLIP."""
SEEN_FRAME = (IMAGE_EMBEDDING, CLIP_STATES, SIGLIP_STATES)
"""Fields that a vision encoder makes of the first frame; a backbone reads at most one."""
TIME_IDS = "added_time_ids"
"""Field of SVD beside these: frames a second - 1, motion bucket, strength of the frame's noise."""
FRAME_NOISE = "frame_noise"
"""Field of data for SVD's encoders in the loop: noise on the first frame, ``[c, h, w]``."""
INPAINTING = (INPAINT_MASK, MASKED_IMAGE)
"""Fields of an inpainting model, in the order of Stable Diffusion's."""
APPENDED = frozenset({*INPAINTING, KNOWN_MASK, KNOWN_VIDEO, IMAGE_LATENT, REFERENCE_IMAGE})


def inpaints(in_channels: int, out_channels: int) -> bool:
    """True if a model of pictures takes a sample, a mask and a masked picture."""
    return in_channels == 2 * out_channels + 1
