"""Weights and gradients: replicas, fp32 masters, gradients that wait."""
