"""The models that are trained: what the network sees of them, and how long they compute."""

from experiments.models.models import MODELS, THESIS_MODELS, load

__all__ = ["MODELS", "THESIS_MODELS", "load"]
