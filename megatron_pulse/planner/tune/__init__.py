"""The hybrid tuner: which degrees, sizes, placement and schedule train a backbone fastest.

============  ===================================================================================
config        one way to run: degrees, microbatch, layout, schedule, recomputation, optimizer
ranks         which rank sits where in the cluster, and what its links are
collectives   which collectives Megatron issues in a step, of which bytes
conditioning  what conditioning and copied embedders move between devices
costs         what its layers cost on a rank; why it cannot run however it is cut
stages        what its stages are: cuts, memory, the problem to schedule
estimate      what a config takes at the least, and about, without a schedule
evaluate      what a config takes, by simulating the schedule that would run
searching     best-first branch and bound over all configs, with an answer at any moment
sharded       what FSDP2 and HSDP would come to at their best, to say so where they win
explain       why the best is the best, and what to change where nothing fits
tune          all of these in one call
plans         what was found as a plan file; a plan file's figures worked out again
============  ===================================================================================

PULSE (section VI) assumes M = P, seven times the parameters as memory, and neither tensor
parallelism nor recomputation nor overlap; none of that is assumed here.
"""
