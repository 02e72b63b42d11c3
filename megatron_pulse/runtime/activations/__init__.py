"""Policies for the tensors that layers save for backward: recompute, recompute selectively,
offload.
"""
