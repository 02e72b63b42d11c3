"""Bubble filling: run frozen components in the idle time of a schedule. See README.md."""
