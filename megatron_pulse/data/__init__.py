"""Images and latents to microbatches."""
