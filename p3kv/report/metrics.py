"""A process's numbers over HTTP, in Prometheus's format."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, Any, Callable, Iterator, Optional

from msgspec import structs

from p3kv.common.addresses import endpoint
from p3kv.common.log import REPORTS
from p3kv.config import Settings
from p3kv.errors import ConfigError
from p3kv.wire.messages import GAUGES, Numbers

if TYPE_CHECKING:
    from p3kv.report.serving import Serving

_MORE_PORTS = 64
"""How many ports after the one that is set are tried: several processes share a host."""
_UNITS = (("_bytes_s", "_bytes_per_second"), ("_s", "_seconds"))
"""How numbers' names end, and how Prometheus's do."""
HELP = {
    "uptime_s": "Time since the process began to measure",
    "bytes_sent": "Bytes of gradients sent in slices, without headers",
    "bytes_received": "Bytes of new values received in slices, without headers",
    "slices_sent": "Slices of gradients sent",
    "slices_received": "Slices of new values received",
    "inversions": "Slices that left while a more urgent one waited for another connection",
    "inversion_bytes": "Bytes of slices that left while a more urgent one waited for another "
    "connection",
    "stale_values": "Values of whole keys with which the worker has gone on by another consistency "
    "rule than the default",
    "stale_rounds": "Rounds that these values have lacked, in all",
    "most_stale_rounds": "The most rounds that one of these values has lacked",
    "wire_bytes_sent": "Bytes sent on data connections, with headers: a worker's to servers on "
    "other hosts, a server's to all workers",
    "wire_bytes_received": "Bytes received on data connections, with headers: a worker's from "
    "servers on other hosts, a server's from all workers",
    "steps": "Steps that have ended",
    "step_s": "Time of all steps that have ended",
    "computing_s": "Part of the steps' time in which forward and backward passes computed",
    "script_s": "Part of the steps' time in which the script did something else between two steps",
    "network_s": "Part of the steps' time in which the forward pass waited for the network",
    "server_s": "Part of the steps' time in which the forward pass waited for servers that worked",
    "straggler_s": "Part of the steps' time in which the forward pass waited for another worker's "
    "gradients",
    "processor_s": "Part of the steps' time in which the process waited for a free processor",
    "forward_s": "Time of a forward pass without waiting, as estimated from the last steps",
    "backward_s": "Time of a backward pass without waiting, as estimated from the last steps",
    "push_bytes_s": "Bandwidth to all servers together while all workers send, as measured at the "
    "start of the job",
    "queued_frames": "Frames that wait to be handled or sent now",
    "rounds": "Rounds of slices that have ended",
    "last_rounds": "Rounds of slices in which the gradient of this worker was ready last",
    "last_s": "Time by which others' gradients were ready before that of this worker, in all "
    "rounds in which it was last",
}
"""By number, what it is; Prometheus shows this beside the metric."""

_log = logging.getLogger(REPORTS)


class Metrics:
    """Serves the numbers while it exists, from a thread of its own; nothing unless asked to."""

    def __init__(
        self, settings: Settings, role: str, rank: int, numbers: Callable[[], Optional[Numbers]]
    ) -> None:
        """`numbers` may be called from any thread. Raises ConfigError if prometheus_client is not
        installed, or no port is free."""
        self._numbers = numbers
        self._role = role
        self._rank = str(rank)
        self._serving: Optional[Serving] = None
        if settings.metrics_port is not None:
            self._serve(settings.metrics_host, settings.metrics_port)

    def collect(self) -> Iterator[Any]:
        """The metrics, as prometheus_client asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        numbers = self._numbers()
        for name, value in {} if numbers is None else structs.asdict(numbers).items():
            if isinstance(value, str):
                continue
            kind = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            by_worker = isinstance(value, tuple)
            labels = ["rank", "worker"] if by_worker else ["rank"]
            family = kind(f"p3kv_{self._role}_{_with_unit(name)}", HELP[name], labels=labels)
            for worker, number in enumerate(value if by_worker else (value,)):
                family.add_metric([self._rank, str(worker)][: len(labels)], number)
            yield family

    def close(self) -> None:
        """Ends the thread and closes the port; may be called twice."""
        if self._serving is not None:
            self._serving.close()
            self._serving = None

    def close_in_child(self) -> None:
        """Closes the port in a forked child, which has no such thread."""
        if self._serving is not None:
            self._serving.close_in_child()
            self._serving = None

    def _serve(self, host: str, first: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app
        except ImportError:
            raise ConfigError(
                "P3KV_METRICS_PORT needs the package prometheus_client: pip install 'p3kv[metrics]'"
            ) from None
        # Most jobs serve none, and it imports asyncio.
        from p3kv.report.serving import Serving

        registry = CollectorRegistry()
        registry.register(self)
        for port in range(first, min(first + _MORE_PORTS, 65535) + 1 if first else 1):
            try:
                listener = _listener(host, port)
            except OSError as error:
                why = error.strerror or str(error)
                continue
            self._serving = Serving(listener, make_wsgi_app(registry))
            _log.setLevel(logging.INFO)
            at = self._serving.address[1]
            _log.info("metrics for Prometheus are at http://%s/metrics", endpoint(host, at))
            return
        raise ConfigError(
            f"no metrics can be served at {host}, port {first} and up: {why}. P3KV_METRICS_HOST "
            "must be an address of this host; P3KV_METRICS_PORT=0 takes any free port"
        )


def _listener(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, address = found[0]
    return socket.create_server(address, family=family)


def _with_unit(name: str) -> str:
    for ours, theirs in _UNITS:
        if name.endswith(ours):
            return name[: -len(ours)] + theirs
    return name
