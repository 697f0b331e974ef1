"""Real networks on real data: for figures that ask what a model learns, and not only how fast."""
