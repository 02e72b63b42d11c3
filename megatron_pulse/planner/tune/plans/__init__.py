"""The tuner's outcome as a plan file, and the figures of a plan file as the tuner has them."""
