"""Experiments: models, bounds, simulation, and what reproduces the paper's figures."""
