"""Objectives, noise, averaged weights, sampling and pictures."""
