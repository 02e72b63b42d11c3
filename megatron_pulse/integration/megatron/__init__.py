"""Patches that Megatron needs here, and our stages as its modules."""
