"""Adapters: small trained parts beside frozen weights (LoRA, DoRA, LoKr).

- ``adapter.py``: settings, record, and the layers that it targets; ``choice.py``: its flags.
- ``low_rank.py``, ``kronecker.py``: the arithmetic, and initial values; ``merge.py``: its effect in
  the weights.
- ``files.py``: adapter files of diffusers, peft and kohya.

A backbone gets its adapter in ``model_specs/common/attach_adapter.py``.
"""
