"""Runs on the throttled cluster: planned, measured, and kept with what they ran on."""
