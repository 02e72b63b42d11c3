"""Search over all configs, with an answer at any moment.

=================  ==============================================================================
budget             time budget and work estimates
search             best-first branch and bound over all configs
low_memory         search under low memory: full recomputation first, then as little as necessary
warm_start         the first configs simulated for each degree and layout
fidelity           fidelity levels of a config, from an estimate to a simulated schedule
neighbourhood      neighbours of a good config
candidates         priority queue of configs, and partitions to reuse
calibration        calibration of estimates by simulations
improvement_model  expected gain of a longer schedule search
grouping           groups of alike configs
result             search result
refine             refinement: whole schedules and local search for the best configs
=================  ==============================================================================
"""
