"""What runs where and when. Imports no torch.

============== ==================================================================================
``cluster/``   devices and links: what there is to train on
``layout/``    which device hosts which stage, which layers a stage holds, how skips then travel
``partition/`` where the chain is cut, and what a partition costs
``schedule/``  in which order each device works: bounds, classic schedules, synthesis, programs
``step/``      all of a step compiled: messages, events, proven, and replayed as it will run
``plan_file/`` a plan as JSON
``tune/``      which of all ways to train
``observe/``   what a run did, beside its plan
``draw/``      pictures of all these
============== ==================================================================================
"""
