"""Whether checkpoints are what was saved, and what to go on from where they are not."""
