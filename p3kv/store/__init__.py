"""Basis of all frameworks' stores: rounds and steps of pushes, clipped steps, forward order."""
