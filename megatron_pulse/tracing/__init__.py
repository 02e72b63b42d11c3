"""Chains derived from any torch module: exported, cut, and used as layers of a backbone."""
