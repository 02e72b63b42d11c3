"""Adapters: small trained parts beside frozen weights (LoRA).

- ``choice.py``: flags and record of an adapter, and the layers that it targets.
- ``attach.py``: a backbone with an adapter.
- ``low_rank.py``: the arithmetic, and initial values.
- ``files.py``: adapter files of diffusers, peft and kohya.
"""
