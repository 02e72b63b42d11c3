"""Megatron's flags: supported, refused, or meaningless here (``megatron.txt``).

``constraints.txt`` has the constraints between the supported ones, and their ranges of numbers.
"""
