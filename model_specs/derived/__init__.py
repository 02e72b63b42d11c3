"""Backbones named by a module instead of a family: diffusers classes and user code.

- ``diffusers:FOLDER``: the class and config named in ``config.json``; or ``diffusers:CLASS``
- ``package.module:factory``, ``path/to/file.py:factory``: a function that returns a torch module,
  or a module with its inputs and the keywords of ``from_module``, or a chain (``Backbone``)
"""
