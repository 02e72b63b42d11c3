"""Commands for partitions, schedules and plans: find, check, show."""
