"""Planner: assignment of layers to devices, and order of operations. Imports no torch.

================ ================================================================================
``cluster/``     devices, their memory, and links
``layout/``      placement of stages on devices, partition into stages, routes of skips
``partition/``   search for the best cuts, and costs of a partition
``schedule/``    order of operations: bounds, classic schedules, synthesis, integer programs
``program/``     compiled program of a step: messages, events, deadlock check, simulation
``bubble_fill/`` frozen encoders in bubbles
``plan_file/``   plan files (JSON)
``tune/``        search for the fastest configuration
``trace/``       traces of runs, compared with plans
``draw/``        pictures of partitions, schedules and traces
================ ================================================================================
"""
