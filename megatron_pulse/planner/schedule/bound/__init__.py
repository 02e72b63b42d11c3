"""Lower bounds on the makespan of schedules."""
