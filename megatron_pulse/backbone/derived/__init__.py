"""Chains that are derived from any torch module: exported, cut, and as layers of a backbone."""
