"""Watchdog: progress of a rank seen from another thread, and diagnosis of a job that
stands still.
"""
