"""What a run begins with and leaves: found, compared, locked, loaded, saved."""
