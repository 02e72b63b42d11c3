"""Folders of latents with their conditioning, written once and read in every run."""
