"""Integration with Megatron. A package imports those above it in this list, never those below.

==========  ====================================================================================
flags       supported flags of Megatron, the ``--pulse-*`` flags, and refused ones
megatron    patches that Megatron needs here, and our stages as its modules
planning    the plan of a run: by flags, by a file, or tuned on the spot
checkpoint  start of a run, its saved states, published weights
loop        hooks around and inside a training step
(files)     ``data``, and on top the two entry points: ``pretrain`` and ``sampling``
==========  ====================================================================================
"""
