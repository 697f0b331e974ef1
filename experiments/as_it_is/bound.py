"""The least time that a step of a script for DistributedDataParallel can take, whatever the store.

torchrun ... -m experiments.as_it_is.bound SCRIPT: what a step of a script in its large size reads
and computes, as JSON: [[kind, parameter, bytes, seconds], ...]
"""

from __future__ import annotations

import builtins
import itertools
import json
import os
import runpy
import subprocess
import sys
from contextlib import suppress
from typing import Any, Dict, List, NamedTuple, Sequence

from experiments.as_it_is import __main__ as scripts
from p3kv.report.forecast.bound import wire_time_s

READ, GRADIENT, NORM = "read", "gradient", "norm"
_WARM_UP, _STEPS = 3, 7
"""So many steps are not recorded, and so many are."""


class Event(NamedTuple):
    """The script reads a parameter and computes with it, its gradient is computed, or the norm of
    all gradients is asked for."""

    kind: str
    parameter: int = -1
    size_bytes: int = 0
    seconds: float = 0.0


def events_of(script: str) -> List[Event]:
    """What a step of a script does, in order, with emulated seconds: that of some whose computing
    is the median. Trains on two ranks of this host."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, "-m", __spec__.name, script]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    told = [line for line in done.stdout.splitlines() if line.startswith("[[")]
    if not told:
        raise RuntimeError(f"{script} makes no {_WARM_UP + _STEPS} steps, or fails")
    return [Event(*one) for one in json.loads(told[0])]


def bound_s(
    events: Sequence[Event], compute_s: float, hosts: int, link_bit_s: float, by_servers: bool
) -> float:
    """Seconds of a step, of which `compute_s` are computed: no order of sending is faster.

    Gradients and new values of some parameters are on the wire between the time when the first of
    these gradients is complete (for the last time in the step) and that when the last of the
    values is read: in the next step, or in this one after `backward`. If workers update the
    weights, means are read at the end of the step. Where servers update them by the norm of all
    gradients, no value leaves before all gradients have come.
    """
    scale = compute_s / sum(event.seconds for event in events)
    gradient_s: Dict[int, float] = {}
    first_s: Dict[int, float] = {}
    again_s: Dict[int, float] = {}
    ends_s = itertools.accumulate(scale * event.seconds for event in events)
    for (kind, parameter, _, seconds), end_s in zip(events, ends_s):
        if kind == GRADIENT:
            gradient_s[parameter] = end_s
            again_s.pop(parameter, None)
        elif kind == READ:
            first_s.setdefault(parameter, end_s - scale * seconds)
            again_s.setdefault(parameter, end_s - scale * seconds)
    sizes = {event.parameter: event.size_bytes for event in events}
    # For how long the script computes in the same step after a value is read; less than nothing
    # where the next step reads it.
    left_s = dict.fromkeys(gradient_s, 0.0)
    for one in gradient_s if by_servers else ():
        is_again = again_s.get(one, -1.0) >= gradient_s[one]
        left_s[one] = compute_s - again_s[one] if is_again else -first_s[one]

    def wire_s(ready_s: float, least_left_s: float) -> float:
        """Of what is ready then or later, and is read as early as that or earlier."""
        chosen = [
            sizes[one]
            for one in gradient_s
            if gradient_s[one] >= ready_s and left_s[one] >= least_left_s
        ]
        return wire_time_s(sum(chosen), hosts, link_bit_s)

    ready, left = {*gradient_s.values()}, {*left_s.values()}
    if by_servers and any(event.kind == NORM for event in events):
        # Gradients are half of what travels.
        all_there_s = max(one + wire_s(one, min(left)) / 2 for one in ready)
        return max(compute_s, *(all_there_s + wire_s(0.0, one) / 2 + one for one in left))
    return max(compute_s, *(one + wire_s(one, other) + other for one in ready for other in left))


def main(script: str) -> None:
    """Trains until steps are recorded, and prints one of them."""
    os.environ["SIZE"] = "large"
    sys.path.insert(0, str(scripts.HERE))
    import sizes
    import torch

    steps: List[List[Event]] = [[]]
    numbers = torch.utils.weak.WeakIdKeyDictionary()
    hooked = torch.utils.weak.WeakIdKeyDictionary()

    def note(kind: str, parameter: torch.Tensor, passes: int) -> None:
        number, elems = numbers.setdefault(parameter, len(numbers)), parameter.numel()
        seconds = passes * sizes.FORWARD_S * elems
        steps[-1].append(Event(kind, number, elems * parameter.element_size(), seconds))

    def forward(layer: torch.nn.Module, *_: Any) -> None:
        parameters = [one for one in layer._parameters.values() if one is not None]
        for parameter in parameters:
            note(READ, parameter, 0)  # a layer reads all before it computes
        for parameter in parameters:
            note(READ, parameter, 1)
            if parameter.requires_grad and parameter not in hooked:
                hooked[parameter] = parameter.register_hook(
                    lambda _, parameter=parameter: note(GRADIENT, parameter, 2)
                )

    def noted(call: Any, kind: str) -> Any:
        def note_and_call(first: Any, *arguments: Any, **more: Any) -> Any:
            if kind == NORM:
                steps[-1].append(Event(NORM))
            for parameter in first.parameters() if isinstance(first, torch.nn.Module) else ():
                note(READ, parameter, 0)
            return call(first, *arguments, **more)

        return note_and_call

    class Recorded(Exception):
        pass

    def end_step(text: str = "", **_: Any) -> None:
        if '"loss"' not in text:  # of rank 0 alone
            return
        if len(steps) == _WARM_UP + _STEPS:
            raise Recorded
        steps.append([])

    sizes.computes = lambda seconds: None
    torch.nn.modules.module.register_module_forward_hook(torch._disable_dynamo(forward))
    torch.nn.Module.state_dict = noted(torch.nn.Module.state_dict, READ)
    torch.nn.utils.clip_grad_norm_ = noted(torch.nn.utils.clip_grad_norm_, NORM)
    say, builtins.print = builtins.print, end_step
    with suppress(Recorded):
        runpy.run_path(str(scripts.HERE / f"{script}.py"), run_name="__main__")
    recorded = sorted(steps[_WARM_UP:], key=lambda step: sum(event.seconds for event in step))
    if os.environ["RANK"] == "0":
        say(json.dumps(recorded[len(recorded) // 2]), flush=True)
    os._exit(0)  # without what the script's process group says of its end


if __name__ == "__main__":
    main(sys.argv[1])
