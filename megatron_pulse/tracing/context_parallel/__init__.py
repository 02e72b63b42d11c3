"""Context parallelism of derived chains: every rank of a group computes a share of the tokens."""
