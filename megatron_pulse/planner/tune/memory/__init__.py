"""Memory of each device: peaks over a schedule, and the activation policy that makes a config
fit."""
