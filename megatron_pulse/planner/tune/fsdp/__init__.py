"""FSDP2 and HSDP: sharded data parallelism, beside pipelines.

=========  ======================================================================================
step       operations, bytes, seconds and memory of one FSDP configuration's step
configs    all configurations that divide the batch, each with the least recomputation that fits
recompute  cost and savings of recomputation, by layer
layer_dp   dynamic program: the cheapest recomputation that fits
baseline   the fastest configuration on a cluster, and its comparison with a pipeline
=========  ======================================================================================

Plans run by ``runtime/parameters/fsdp.py``.
"""
