"""Predictions of what a job would reach with each store, before anybody has its hosts."""

from p3kv.tools.plan.predictions import STORES, Prediction, Series, predict
from p3kv.tools.plan.words import advice, caveats, table

__all__ = ["STORES", "Prediction", "Series", "advice", "caveats", "predict", "table"]
