"""Clips of films and of folders of frames."""
