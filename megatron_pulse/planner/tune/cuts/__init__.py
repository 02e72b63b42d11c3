"""Where a config's chain is cut: freely, so that activations have room, and for fewer gradients."""
