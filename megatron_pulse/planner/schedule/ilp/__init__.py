"""Schedules by integer programming: models in Pyomo, solved by HiGHS or GLPK, and CP-SAT.

See ../README.md: Integer programs; ``..solve`` puts the parts together.
"""
