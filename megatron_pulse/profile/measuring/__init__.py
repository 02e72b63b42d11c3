"""Layers built and run alone, and what is counted of them."""
