"""Bubble filling: run frozen components in the bubbles of a schedule. See README.md."""
