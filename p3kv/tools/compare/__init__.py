"""How fast a script trains with several stores: trials, what they have measured, what it means."""

from p3kv.tools.compare.results import Comparison, Measured
from p3kv.tools.compare.trials import Job, TrialFailed, compare, computation
from p3kv.tools.compare.words import about_codecs, notes, outlook, table, verdict

__all__ = [
    "Comparison",
    "Job",
    "Measured",
    "TrialFailed",
    "about_codecs",
    "compare",
    "computation",
    "notes",
    "outlook",
    "table",
    "verdict",
]
