"""Measurement of single layers: construction, times and memory."""
