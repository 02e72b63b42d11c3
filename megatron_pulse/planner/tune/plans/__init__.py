"""Conversion of the tuner's outcome to a plan file, and a plan file's figures computed anew."""
