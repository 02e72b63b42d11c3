"""Megatron's flags: which work here, which are refused, which mean nothing (``megatron.txt``)."""
