"""Costs of each layer: measured on a device, or worked out from operations and bytes.

``profile`` is the value that planning reads and imports no torch, nor do ``files`` (its JSON),
``devices`` (rooflines) and ``table`` (published layer tables). ``measure`` runs layers on a device;
``analytic`` runs them on tensors without memory, ``kernels`` and ``memory`` are what they count.
"""
