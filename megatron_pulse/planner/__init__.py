"""What runs where and when. Imports no torch.

============  ===================================================================================
costs         what layers, links and memory cost (``costs``, ``memory``, ``volume``, ``cluster``)
cuts          where the chain is cut: ``placement``, ``partition`` (``fold``, ``row``), ``ways``
order         ``schedule/``: operations, bounds, classic schedules, synthesis, integer programs
messages      ``routes``, ``communication``, ``program``, proven by ``nccl_check``
plan          ``plan`` (all of it, compiled), ``plan_file`` (as JSON), ``replay`` (as it will run)
choice        ``tune/``: which of all ways to train
afterwards    ``trace``, ``compare_trace``, ``measured``; pictures in ``draw/``
============  ===================================================================================
"""
