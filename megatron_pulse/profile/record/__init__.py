"""What a profile says of one layer and of one edge between layers. Imports no torch."""
