"""Megatron's flags: which work here, which are refused, which mean nothing (``megatron.txt``).

``together.txt`` has what those that work need beside them, and the numbers that they take.
"""
