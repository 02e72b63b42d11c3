"""FSDP2 and HSDP baseline: sharded data parallelism, to compare a plan with.

=========  ======================================================================================
sharding   one FSDP configuration: a step's operations, bytes, seconds and memory
ways       all configurations that divide the batch, each with as few layers recomputed as fit
opponent   the fastest configuration on a cluster, and the comparison with a plan
=========  ======================================================================================

Predictions only: this project does not run FSDP.
"""
