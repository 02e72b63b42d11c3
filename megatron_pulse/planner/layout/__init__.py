"""Placement of stages on devices, and routes of tensors between stages."""
