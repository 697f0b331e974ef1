"""PyTorch's optimizers on servers, and their states."""
