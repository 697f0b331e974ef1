"""How many servers pay for a script: trials, the equation that is fitted to them, the choice."""

from p3kv.tools.tune.equation import Equation, fit
from p3kv.tools.tune.search import Tuning, tune
from p3kv.tools.tune.words import choice, equation, size_choice, sizes, table

__all__ = [
    "Equation",
    "Tuning",
    "choice",
    "equation",
    "fit",
    "size_choice",
    "sizes",
    "table",
    "tune",
]
