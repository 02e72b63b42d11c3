"""Records of a profile for layers and edges between them. Imports no torch."""
