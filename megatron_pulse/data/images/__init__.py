"""Datasets of images: digits, emoji, folders."""
