"""Which device hosts which stage, and what then goes from stage to stage."""
