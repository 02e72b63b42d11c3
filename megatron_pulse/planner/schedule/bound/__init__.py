"""No schedule is shorter: lower bounds."""
