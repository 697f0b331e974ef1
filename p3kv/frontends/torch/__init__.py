"""PyTorch's front end. Only modules in this folder import torch."""
