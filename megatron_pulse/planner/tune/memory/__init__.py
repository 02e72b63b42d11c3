"""What devices hold: in each moment of a schedule, and what is not kept where that is too much."""
