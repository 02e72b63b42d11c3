"""What Megatron needs to run here, and our stages as its modules."""
