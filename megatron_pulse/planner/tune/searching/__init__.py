"""The search over all configs, with an answer at any moment.

========  =======================================================================================
budget    the time that may be spent, and how much of it a piece of work will take
search    best-first branch and bound over all configs
tuning    what a search found: the best, and what became of the others
finish    whole schedules for the best
========  =======================================================================================
"""
