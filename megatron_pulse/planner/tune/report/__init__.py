"""Reports on a search.

====================  ===========================================================================
explain               why other configs are slower, and how certain the result is
fewer_devices_advice  scale-down advice: one device or one node that would train faster than all
data_parallel         data parallelism on the same cluster, as a baseline
oom_advice            out-of-memory advice: changes with which a config would fit
====================  ===========================================================================
"""
