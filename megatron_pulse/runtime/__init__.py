"""Execution of a plan on tensors: stages, links, the tensor store, the executor."""
