"""A worker's part in checkpoints: when there is one, what it writes, and how it goes on."""
