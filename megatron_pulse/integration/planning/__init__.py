"""Plan of a run: by flags, by a file, or tuned on the spot."""
