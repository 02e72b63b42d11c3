"""Cuts, schedules, ways to train, and plans: found, checked, shown."""
