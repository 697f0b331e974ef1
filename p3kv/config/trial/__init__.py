"""A trial: a short job in which a script trains a few steps with one store, and is timed."""

from p3kv.config.trial.reports import LayerReady, Report, Reports, tell
from p3kv.config.trial.trial import ALONE, FIFO, NATIVE, P3KV, Trial

__all__ = ["ALONE", "FIFO", "NATIVE", "P3KV", "LayerReady", "Report", "Reports", "Trial", "tell"]
