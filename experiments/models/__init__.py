"""The models that are trained: what the network sees of them, and how long they compute."""

from experiments.models.models import MODELS, Model, load

__all__ = ["MODELS", "Model", "load"]
