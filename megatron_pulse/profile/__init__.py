"""Costs of layers; today their parameters."""
