"""Which checkpoint a run goes on from, what else there is in its folder, and what of it can go."""
