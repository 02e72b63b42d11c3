"""Runs that are disturbed: random faults at random moments of random layouts, and what is left."""
