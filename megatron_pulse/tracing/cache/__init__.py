"""Disk cache of derived chains, so that a second start of a large module does not export again."""
