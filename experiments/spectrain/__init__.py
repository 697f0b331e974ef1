"""Figures of SpecTrain (C.-C. Chen et al., arXiv 1809.02839): weights predicted where they are
stale."""
