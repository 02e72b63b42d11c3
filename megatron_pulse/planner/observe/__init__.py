"""What a run did, beside its plan."""
