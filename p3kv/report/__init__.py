"""Conclusions from measured numbers: rates, and whether the network is the limit."""

from p3kv.report.rates import Rates, rates
from p3kv.report.verdict import Verdict, verdict

__all__ = ["Rates", "Verdict", "rates", "verdict"]
