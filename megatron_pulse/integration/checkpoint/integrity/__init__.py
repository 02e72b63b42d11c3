"""Integrity of checkpoints: hashes, index, and their verification."""
