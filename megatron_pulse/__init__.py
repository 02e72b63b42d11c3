"""Skip-aware pipeline parallelism for diffusion backbones on Megatron-Core."""
