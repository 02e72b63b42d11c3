"""Reports on a search.

==========  =====================================================================================
explain     why other configs are slower, and how certain the result is
scale_down  scale-down advice: one device or one node that would train faster than all
oom_advice  out-of-memory advice: changes with which a config would fit
==========  =====================================================================================
"""
