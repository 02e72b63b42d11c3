"""Transformer Engine's own classes, as far as they can be looked at without a GPU."""
