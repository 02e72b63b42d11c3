"""The ``pulse`` command: ``main`` lists all commands, and each is one module that adds itself."""
