"""Conclusions from measured numbers: rates, and whether the network is the limit."""

from p3kv.report.verdict import Rates, Verdict, rates, verdict

__all__ = ["Rates", "Verdict", "rates", "verdict"]
