"""Predictions of what a job would reach with each store, before anybody has its hosts."""

from p3kv.tools.plan.predictions import Prediction, Series, predict, stores
from p3kv.tools.plan.words import advice, caveats, table

__all__ = ["Prediction", "Series", "advice", "caveats", "predict", "stores", "table"]
