"""Backbones that are named by a module, not by a family: diffusers' classes and code of one's own.

- ``diffusers:FOLDER``: the class and the config that ``config.json`` names; ``diffusers:CLASS``
- ``package.module:factory``, ``path/to/file.py:factory``: a function that returns a torch module,
  or a module with its inputs and the keywords of ``from_module``, or a chain (``Backbone``)
"""
