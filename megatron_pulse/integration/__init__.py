"""Everything that touches Megatron: flags, hooks, checkpoints, CPU compatibility."""
