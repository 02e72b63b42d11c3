"""Search over all configs, with an answer at any moment.

===========  ====================================================================================
budget       time budget and work estimates
search       best-first branch and bound over all configs
short        search under low memory: full recomputation first, then as little as necessary
scouts       warm start: the first configs simulated for each degree and layout
steps        fidelity levels of a config, from an estimate to a simulated schedule
variants     neighbourhood of a good config
candidates   priority queue of configs, and partitions to reuse
corrections  calibration of estimates by simulations
hopes        expected gain of a longer schedule search
kinds        groups of alike configs, and their neighbours
tuning       search result
finish       refinement: whole schedules and local search for the best configs
===========  ====================================================================================
"""
