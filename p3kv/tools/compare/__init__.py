"""How fast a script trains with several stores: trials, what they have measured, what it means."""

from p3kv.tools.compare.results import Comparison, Measured, Steps
from p3kv.tools.compare.trials import TrialFailed, TrialJob, Trials, compare, computation
from p3kv.tools.compare.words import about_codecs, notes, outlook, table, verdict

__all__ = [
    "Comparison",
    "Measured",
    "Steps",
    "TrialFailed",
    "TrialJob",
    "Trials",
    "about_codecs",
    "compare",
    "computation",
    "notes",
    "outlook",
    "table",
    "verdict",
]
