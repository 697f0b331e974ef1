"""Parts of a step's time, which add up to it."""

from __future__ import annotations

from typing import Callable, List, NamedTuple, Sequence


class Parts(NamedTuple):
    """Seconds of one step, or of several. None is negative, and together they are the step."""

    computing_s: float = 0.0
    """Forward and backward passes."""
    script_s: float = 0.0
    """All gradients were ready, and the script had not begun the next forward pass: it read data,
    validated, or ran Python."""
    network_s: float = 0.0
    """The forward pass waited for values, and none of what follows was the reason."""
    server_s: float = 0.0
    """It waited, and the value's server worked."""
    straggler_s: float = 0.0
    """It waited, and another worker's gradient was not ready."""
    processor_s: float = 0.0
    """This process could go on, and no processor was free for it."""

    @property
    def waiting_s(self) -> float:
        """For how long it waited for values under way: on the network and at the servers."""
        return self.network_s + self.server_s

    def plus(self, other: Parts) -> Parts:
        """Adds the parts of both."""
        return Parts(*[one + more for one, more in zip(self, other)])


class Wait(NamedTuple):
    """From when to when a forward pass, or the script, waited for one value.

    `last_ready_s`: when the last worker's gradient for it was ready. `worked_s`: for how long its
    server has worked meanwhile.
    """

    begin_s: float
    end_s: float
    last_ready_s: float
    worked_s: float

    @property
    def seconds(self) -> float:
        """How long."""
        return max(0.0, self.end_s - self.begin_s)

    def parts(self) -> Parts:
        """Parts of the wait, by cause."""
        straggler_s = min(max(0.0, self.last_ready_s - self.begin_s), self.seconds)
        server_s = min(max(0.0, self.worked_s), self.seconds - straggler_s)
        network_s = self.seconds - straggler_s - server_s
        return Parts(network_s=network_s, server_s=server_s, straggler_s=straggler_s)


class Layer(NamedTuple):
    """A layer's value, in the order of the forward pass: when the pass comes to it if it waits for
    nothing, in seconds from its begin, and when the value arrived."""

    after_s: float
    arrived_s: float
    last_ready_s: float
    server: int
    """Rank of the server whose slice came last."""


Worked = Callable[[int, float, float], float]
"""For how long a server has worked between two times."""


def forward_waits(begin_s: float, layers: Sequence[Layer], worked: Worked) -> List[Wait]:
    """Where a forward pass has waited that began at `begin_s`."""
    waits, waited_s = [], 0.0
    for layer in layers:
        wanted_s = begin_s + layer.after_s + waited_s
        if layer.arrived_s > wanted_s:
            worked_s = worked(layer.server, wanted_s, layer.arrived_s)
            waits.append(Wait(wanted_s, layer.arrived_s, layer.last_ready_s, worked_s))
            waited_s += layer.arrived_s - wanted_s
    return waits


class Delayed(NamedTuple):
    """The shares of time in which threads could go on and had no processor: of those that compute
    the one that was delayed most, which may be the script's; the script's; and the one that sends
    and receives."""

    passes: float = 0.0
    script: float = 0.0
    exchange: float = 0.0


def parts_of_step(
    step_s: float,
    script_s: float,
    waits: Sequence[Wait],
    longest_s: float,
    delayed: Delayed = Delayed(),  # noqa: B008  a constant
) -> Parts:
    """Parts into which a step's time went. `waits` say for what there was waiting, for `longest_s`
    in all at most. What is nothing else is computing."""
    script_s = min(max(0.0, script_s), step_s)
    for_what = Parts()
    for wait in waits:
        for_what = for_what.plus(wait.parts())
    waited_s = sum(for_what)
    most_s = min(waited_s, max(0.0, longest_s), step_s - script_s)
    scale = most_s / waited_s if waited_s > 0 else 0.0
    network_s, server_s, straggler_s = (
        scale * seconds for seconds in (for_what.network_s, for_what.server_s, for_what.straggler_s)
    )
    computing_s = max(0.0, step_s - script_s - network_s - server_s - straggler_s)
    passes_s = min(computing_s, delayed.passes * step_s)
    # The script's thread was delayed in the passes or between them.
    between_s = min(script_s, max(0.0, delayed.script * step_s - passes_s))
    exchange_s = delayed.exchange * network_s
    return Parts(
        computing_s - passes_s, script_s - between_s, network_s - exchange_s, server_s,
        straggler_s, passes_s + between_s + exchange_s,
    )  # fmt: skip
