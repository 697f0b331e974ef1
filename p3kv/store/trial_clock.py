"""Counts and times the steps of a script in a trial."""

from __future__ import annotations

import statistics
import time
from typing import Any, Dict, List, Mapping, Optional, Tuple

from p3kv import config
from p3kv.config.trials import LayerReady, Report, Trial, tell
from p3kv.errors import NotSupportedError
from p3kv.wire.messages import Key
from p3kv.worker import this_process


def check_rule_of_trial(consistency: Optional[str]) -> None:
    """Raises NotSupportedError for a store's rule, or the settings', that can't be compared."""
    rule = config.current().consistency if consistency is None else consistency
    if rule != config.Settings.consistency:
        raise NotSupportedError(
            f"p3kv compare and p3kv tune time synchronous training, and the consistency here is "
            f"'{rule}', by which other numbers come out: run them without it, and time this rule "
            "by the script"
        )


class TrialClock:
    """Times steps by when one and the same gradient is ready in each. The front end says when;
    `step_ready` and `layer_ready` may be called in any thread, all else in the script's."""

    front_end: str
    """Name of the front end."""
    native: str
    """Name of the framework's own synchronous store."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self._steps = 0
        self._steps_ready: List[Any] = []
        self._cpu_s: List[float] = []
        self._layers_ready: Dict[Key, List[Tuple[int, Any]]] = {}
        """By key: in which steps its gradient was ready, and the moment."""
        self._numbers: Dict[Key, int] = {}
        self._size_bytes: Dict[Key, int] = {}
        self._sends_all = True
        self._notes: Dict[str, None] = {}
        self._has_told = False

    def note(self, text: str) -> None:
        """Takes note of what makes this trial differ from the others."""
        self._notes.setdefault(text)

    def sends_less(self) -> None:
        """Takes note that a step does not send every element."""
        self._sends_all = False

    def note_key(self, key: Key) -> None:
        """Takes note of a key. Texts have the numbers of their declaration."""
        self._numbers[key] = key if isinstance(key, int) else len(self._numbers)

    def begin_step(self) -> None:
        """Counts a step."""
        self._steps += 1

    @property
    def is_over(self) -> bool:
        """Whether the step has begun that ends the last measured one."""
        return self._steps >= self.trial.last_step

    def seconds(self, moment: Any) -> float:
        """Seconds of the monotonic clock at a moment that the front end gave; asked in `tell`."""
        return float(moment)

    def step_ready(self, moment: Any = None) -> None:
        """The gradient by which steps are timed is ready, now or at `moment`."""
        self._steps_ready.append(time.monotonic() if moment is None else moment)
        self._cpu_s.append(time.process_time())

    def time_layer(self, key: Key, size_bytes: int) -> int:
        """Takes note of a key's size; returns the step for `layer_ready`."""
        self._size_bytes[key] = size_bytes
        self._layers_ready.setdefault(key, [])
        return self._steps

    def layer_ready(self, key: Key, step: int, moment: Any = None) -> None:
        """A key's gradient is ready in a step, now or at `moment`."""
        self._layers_ready[key].append((step, time.monotonic() if moment is None else moment))

    def tell(self) -> None:
        """Tells whoever runs the trial what was measured, once. All gradients must be ready."""
        if self._has_told:
            return
        self._has_told = True
        measured = _measured()
        verdict = measured.get("verdict")
        worked_s = [link["worked_s"] for link in measured.get("links", {}).values()]
        tell(
            Report(
                times_s=_from_first([self.seconds(one) for one in self._steps_ready]),
                cpu_s=_from_first(self._cpu_s),
                server_s=max(worked_s, default=0.0) / max(1, self._steps),
                layers=self._layers(),
                link_bytes_s=None if verdict is None else verdict["link_bytes_s"],
                sends_all=self._sends_all,
                front_end=self.front_end,
                native=self.native,
                notes=tuple(self._notes),
            )
        )

    def _layers(self) -> Tuple[LayerReady, ...]:
        begins_s: Dict[int, float] = {}
        ready_s = {
            key: [(step, self.seconds(moment)) for step, moment in moments]
            for key, moments in self._layers_ready.items()
        }
        for times in ready_s.values():
            for step, at_s in times:
                begins_s[step] = min(begins_s.get(step, at_s), at_s)
        layers = [
            LayerReady(
                self._numbers.get(key, 0),
                self._size_bytes[key],
                round(statistics.median(at_s - begins_s[step] for step, at_s in times), 6),
            )
            for key, times in ready_s.items()
            if times
        ]
        return tuple(sorted(layers, key=lambda layer: layer.ready_s))


def _from_first(seconds: List[float]) -> Tuple[float, ...]:
    return tuple(round(at_s - seconds[0], 6) for at_s in seconds)


def _measured() -> Mapping[str, Any]:
    """The worker's measurements; none where nothing of p3kv's runs."""
    if not this_process.is_worker() or not this_process.worker().started:
        return {}
    measured: Mapping[str, Any] = this_process.worker().stats()
    return measured
