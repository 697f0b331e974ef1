"""What stores of all frameworks have: rounds and steps of pushes, clipped steps, forward order."""
