"""Figures of P.-Y. Wu, "Versatile Communication Optimization for Deep Learning by Modularized
Parameter Server", a master's thesis: placements, and what its optimizations gain."""
