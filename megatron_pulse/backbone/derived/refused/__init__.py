"""What cannot be run in a pipeline as it is, and why."""
