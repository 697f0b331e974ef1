"""MXNet's optimizers on servers and workers, and their states."""
