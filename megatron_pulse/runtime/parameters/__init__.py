"""Weights and gradients: replicas, fp32 main parameters, deferred weight gradients."""
