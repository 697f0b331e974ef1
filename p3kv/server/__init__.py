"""The server: receives slices, sums and updates them by priority, and sends the results."""
