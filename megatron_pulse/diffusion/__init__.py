"""Objectives, noise, EMA, sampling and picture files."""
