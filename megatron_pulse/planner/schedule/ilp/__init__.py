"""Integer programs for schedules: models in Pyomo, solved by HiGHS or GLPK, and CP-SAT.

See ../README.md: Search. ``..solve`` combines them with the constructive search.
"""
