"""Commands that measure layers and links, and compare a run with its plan."""
