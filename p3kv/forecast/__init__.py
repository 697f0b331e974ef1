"""What an iteration takes on another network: the bound, and simulated stores."""

from p3kv.forecast.forecast import Forecast, forecast
from p3kv.forecast.model import Layer, Model, Parameter
from p3kv.forecast.policies import Workload

__all__ = ["Forecast", "Layer", "Model", "Parameter", "Workload", "forecast"]
