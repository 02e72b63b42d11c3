"""Whether checkpoints are what was saved."""
