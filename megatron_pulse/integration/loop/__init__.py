"""Around and inside a training step: the schedule, stopping, the log, how a run ends."""
