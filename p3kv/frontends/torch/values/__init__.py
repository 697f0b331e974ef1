"""Values on their way into the script's tensors, and who waits for them."""
