"""The size of the scripts' models: small, or with SIZE=large of megabytes, whose computing is
emulated beside the real one, as a GPU would do it: the cores serve the network meanwhile.

Each layer waits for a time that is proportional to its parameters: in the forward pass when it has
read them, and twice as long in the backward pass before their gradients are complete.
"""

import os
import time

import torch
from torch.nn.modules.module import register_module_forward_hook

FORWARD_S = 100e-9
"""For each parameter."""
LEAST_S = 1e-3
"""Layers whose times are shorter wait together: a thread that wakes up takes time itself."""
owed_s, hooked = 0.0, torch.utils.weak.WeakIdKeyDictionary()


def sized(small, large):
    """What a script has by its size."""
    return large if os.environ.get("SIZE") == "large" else small


def computes(seconds):
    global owed_s
    owed_s += seconds
    if owed_s > LEAST_S:
        ends = time.monotonic() + owed_s
        owed_s = 0.0
        time.sleep(max(0.0, ends - time.monotonic()))
        owed_s = min(0.0, ends - time.monotonic())  # it has woken up late


def forward(layer, *_):
    for parameter in layer._parameters.values():
        if parameter is not None:
            seconds = FORWARD_S * parameter.numel()
            if parameter.requires_grad and parameter not in hooked:
                hooked[parameter] = parameter.register_hook(
                    lambda _, seconds=2 * seconds: computes(seconds)
                )
            computes(seconds)


if sized(False, True):
    register_module_forward_hook(torch._disable_dynamo(forward))
