"""Where a config's chain is cut: freely, for fewer gradients, and with room for what then runs."""
