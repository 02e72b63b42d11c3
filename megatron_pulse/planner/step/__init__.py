"""A step compiled: messages, events, proven free of deadlock, replayed as it will run."""
