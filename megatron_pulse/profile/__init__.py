"""Costs of each layer: measured on a device, or estimated from operations and bytes.

``profile`` is the value that planning reads. It imports no torch, nor do ``files`` (its JSON),
``roofline`` (devices' peaks) and ``profile_from_table`` (published layer tables). ``measurement``
runs layers on a device. ``analytic`` runs them on meta tensors and counts operations and bytes.
"""
