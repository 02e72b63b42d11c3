"""Devices and links: what there is to train on."""
