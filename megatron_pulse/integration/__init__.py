"""Everything that touches Megatron. A room imports those above it in this list, never below.

==========  ====================================================================================
flags       Megatron's flags that work here, ours, and what is refused
megatron    what Megatron needs to run here, and our stages as its modules
planning    the plan of a run: by flags, by a file, or tuned on the spot
checkpoint  what a run begins with, what it saves, published weights
loop        what happens around and inside a training step
(files)     ``data``, and on top the two ways in: ``pretrain`` and ``sampling``
==========  ====================================================================================
"""
