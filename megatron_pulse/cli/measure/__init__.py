"""What was and will be: layers measured, links measured, a run beside its plan."""
