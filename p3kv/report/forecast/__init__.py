"""Time of an iteration on another network: the bound, and simulated stores."""

from p3kv.report.forecast.forecast import DDP, DIST_SYNC, FRAMEWORKS_OWN, Forecast, forecast
from p3kv.report.forecast.model import Layer, Model, Parameter
from p3kv.report.forecast.simulator import Workload

__all__ = [
    "DDP", "DIST_SYNC", "FRAMEWORKS_OWN", "Forecast", "Layer", "Model", "Parameter", "Workload",
    "forecast",
]  # fmt: skip
