"""Integer program for schedules: a Pyomo model, solved by HiGHS or GLPK (../README.md: Search)."""
