"""Schedules by integer programming: models in Pyomo, solved by HiGHS or GLPK, and CP-SAT.

Source: the project's scheduling.md, section 2; ``..solve`` puts the parts together.
"""
