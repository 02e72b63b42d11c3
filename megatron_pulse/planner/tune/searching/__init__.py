"""The search over all configs, with an answer at any moment.

===========  ====================================================================================
budget       the time that may be spent, and how much of it a piece of work will take
search       best-first branch and bound over all configs
short        the same where memory is short: with all computed again, and then less
scouts       the first look at configs of one degree and layout
steps        what a config takes on its way to a simulated schedule, and what that says of others
variants     what differs little from a good config
candidates   configs on their way, in a queue, and cuts that are known
corrections  how much longer steps take than their estimates
hopes        what steps may take by schedules that are searched for
kinds        what configs have in common, and those that differ in one thing
tuning       what a search found: the best, and what became of the others
finish       whole schedules for the best
===========  ====================================================================================
"""
