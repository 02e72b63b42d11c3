"""Hybrid tuner: the degrees, batch sizes, placement and schedule that train a backbone fastest.

====================  ===========================================================================
config                one configuration: degrees, microbatch size, layout, schedule, recomputation
rank_order            rank order and links of a config in the cluster
collectives           collectives that Megatron issues in a step, with their bytes
conditioning          traffic of conditioning and of replicated embedders
layer_costs           layer costs on one rank; reasons why no partition can help a config
stages                stages of a config: cuts, memory and schedule problem
memory                peak memory, and the activation policy that makes a config fit
partitions            partitions: of least load, memory-feasible, and with balanced gradients
estimate              lower bound and estimate of a config's step time, without a schedule
evaluate              simulated step of a config
fixed_order_estimate  re-timing of a known schedule for moved cuts
link_contention       schedules under link contention
search                best-first branch and bound over all configs, with an answer at any moment
fsdp                  FSDP2 and HSDP baseline
report                explanation, scale-down advice, out-of-memory advice
tune                  all of these in one call
plans                 conversion to plan files; plan figures computed anew
====================  ===========================================================================

PULSE (section VI) assumes M = P and model memory of seven times the parameters, and has neither
tensor parallelism nor recomputation nor overlap. None of that is assumed here.
"""
