"""Whether checkpoints are what was saved, what to go on from where not, and what can go."""
