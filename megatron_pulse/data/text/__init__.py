"""Captions, and a small encoder of their words."""
