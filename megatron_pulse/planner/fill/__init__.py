"""Work of frozen components in the idle time of a schedule: README.md beside this."""
