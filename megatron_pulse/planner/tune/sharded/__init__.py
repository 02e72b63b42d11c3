"""Parameters divided over devices as FSDP2 and HSDP do it: what to take instead of a plan.

=========  ======================================================================================
sharding   one way to shard: a step's operations, bytes, seconds and memory
ways       all ways that divide the batch, each with as few layers recomputed as fit
opponent   the fastest of all on a cluster, and what it is beside a plan
=========  ======================================================================================

Only predicted: this project does not run them.
"""
