"""Detection of modules that cannot run in a pipeline, with reasons."""
