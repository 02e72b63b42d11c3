"""Whether a schedule can run, and what it then takes."""
