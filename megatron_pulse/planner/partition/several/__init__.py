"""Cuts of several stages on each device: searched block by block, then moved and shaken."""
