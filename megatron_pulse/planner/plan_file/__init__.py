"""Plan files (JSON): schema, reading and writing, validation."""
