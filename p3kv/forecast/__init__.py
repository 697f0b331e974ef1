"""What an iteration takes on another network: the bound, and simulated stores."""

from p3kv.forecast.forecast import Forecast, forecast
from p3kv.forecast.policies import Workload

__all__ = ["Forecast", "Workload", "forecast"]
