"""What a rank does, seen by another thread of it, and what all ranks do, when nothing moves."""
