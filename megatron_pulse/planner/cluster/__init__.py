"""Clusters: devices, memory, and links."""
