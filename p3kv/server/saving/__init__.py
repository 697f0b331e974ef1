"""A server's part in checkpoints: copies of all keys between the same steps."""
