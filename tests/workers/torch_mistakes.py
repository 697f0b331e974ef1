"""Mistakes of scripts that used DistributedDataParallel before, each of which is named."""

from __future__ import annotations

import copy
import sys

import p3kv.torch  # isort: skip
import torch
from torch import distributed, nn
from torch_refusals import refused

from p3kv.errors import ConfigError
from p3kv.frontends.torch.front_end import Torch

model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
inner = torch.optim.AdamW(model.parameters())
make = p3kv.torch.Optimizer
if sys.argv[1:] == ["forgot"]:
    for _ in range(5):
        model(torch.ones(1, 4)).sum().backward()
        inner.step()
    print("has trained", flush=True)
    sys.exit()

refused("the model comes first", make, inner, model, kind=ConfigError)
refused("not an object of the type generator", make, model.parameters(), inner, kind=ConfigError)
refused("not None", make, None, inner, kind=ConfigError)
refused("not the class AdamW", make, model, torch.optim.AdamW, kind=ConfigError)
refused("not None", make, model, None, kind=ConfigError)
refused("no parameter of the model", make, copy.deepcopy(model), inner, kind=ConfigError)
refused("no parameter of the model", make, nn.ReLU(), inner, kind=ConfigError)
refused(
    "did you mean 'broadcast'?", lambda: make(model, inner, buffers="brodcast"), kind=ConfigError
)
refused(
    "did you mean 'delayed'?", lambda: make(model, inner, consistency="delay"), kind=ConfigError
)
refused(
    "did you mean 'staleness'?",
    lambda: make(model, inner, consistency="delayed:stalenes=1"),
    kind=ConfigError,
)

for call, advice in (
    (lambda: torch.utils.data.DistributedSampler(range(9)), "num_replicas=optimizer.num_workers"),
    (lambda: model.no_sync(), "optimizer.no_sync()"),
    (lambda: model.module, "leave .module out"),
):
    try:
        call()
    except (AttributeError, RuntimeError, ValueError) as error:
        assert advice in Torch().advice_for(error), error
    else:
        raise AssertionError(advice)

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
wrapped = nn.parallel.DistributedDataParallel(model)
refused("the model is wrapped in DistributedDataParallel", make, wrapped, inner)
refused("the module '1' of the model is wrapped", make, nn.Sequential(nn.ReLU(), wrapped), inner)
refused("the model is wrapped in DataParallel", make, nn.DataParallel(model), inner)

optimizer = make(wrapped.module, inner)
refused("calls the model by DistributedDataParallel", wrapped, torch.ones(1, 4))
refused("leave DistributedDataParallel out", nn.parallel.DistributedDataParallel, model)
wrapped.module(torch.ones(1, 4)).sum().backward()
optimizer.step()
distributed.destroy_process_group()
print("all mistakes are named")
