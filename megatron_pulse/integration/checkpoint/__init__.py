"""Checkpoints of a run: found, compared, locked, loaded, saved."""
