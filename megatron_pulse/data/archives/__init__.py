"""Pictures within archives and tables, read by index."""
