"""The ``pulse`` command: ``main`` knows all commands; each is one module that adds itself."""
