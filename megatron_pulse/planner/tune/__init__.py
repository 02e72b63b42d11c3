"""The hybrid tuner: which degrees, sizes, placement and schedule train a backbone fastest.

========  =======================================================================================
config    one way to run: degrees, microbatch, layout, schedule, recomputation, optimizer
ranks     which rank sits where in the cluster, and what its links are
evaluate  what a config takes, by simulating the schedule that would run, or why it cannot run
search    best-first branch and bound over all configs
report    the result as a table and in words
========  =======================================================================================

PULSE (section VI) assumes M = P, seven times the parameters as memory, and neither tensor
parallelism nor recomputation nor overlap; none of that is assumed here.
"""
