"""``pulse tune``: its input, its search, and its report."""
