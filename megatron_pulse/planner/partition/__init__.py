"""Where the chain is cut, and what a partition costs."""
