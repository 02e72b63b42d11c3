"""``pulse tune``: what it is given, what it finds, and how it says so."""
