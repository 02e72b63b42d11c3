"""Whether checkpoints are what was saved, what to go on from where they are not, and what can go."""
