"""Tensors between operations: kept on the device, or sent to another device over a channel."""
