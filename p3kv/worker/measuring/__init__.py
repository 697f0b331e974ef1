"""What a worker measures of its steps, and how it tells."""
