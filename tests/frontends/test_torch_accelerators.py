"""p3kv.torch on an accelerator beside p3kv.torch on the CPU, in real jobs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.frontends.test_torch import job
from tests.jobs import environment, run
from tests.torch_environment import NEEDS_TORCH, PYTHON

pytestmark = NEEDS_TORCH


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("cpu", marks=pytest.mark.long),
        pytest.param("any", marks=pytest.mark.accelerator),
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    """The device's type: of the CPU, only the job itself is tested."""
    found: str = request.param
    program = "import torch; raise SystemExit(not torch.accelerator.is_available())"
    if found != "cpu" and run([str(PYTHON), "-c", program], environment(), 60).code != 0:
        pytest.skip("the torch of this environment sees no accelerator")
    return found


def test_numbers_are_those_of_the_cpu(kind: str) -> None:
    """Of a model that is partly on the CPU: with other strides, statistics that are broadcast or
    averaged, layers that are not used or not trained, gradients that add up or are zeroed while
    they leave, clipping, scaled losses, states, half precision, rows, averages that another
    stream reads, a layer that another stream computes, a compiled model, and updates by the
    workers."""
    cases = ["dense", "clipped", "scaled", "half", "rows", "streams", "averages", "compiled"]
    result = job("torch_accelerator.py", kind, *cases, P3KV_SLICE_SIZE=300)
    assert result.code == 0, result.output
    assert all(result.output.count(f"{case} is right on") == 2 for case in cases), result.output


@pytest.mark.parametrize("rule", ["local:steps=3", "delayed:staleness=2"])
def test_other_rules_have_the_numbers_of_the_cpu(kind: str, rule: str) -> None:
    result = job(
        "torch_accelerator.py", kind, "rule", P3KV_SLICE_SIZE=300, P3KV_CONSISTENCY=rule
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count("rule is right on") == 2, result.output


def test_a_weight_that_the_script_writes_to_ends_the_job(kind: str) -> None:
    result = job("torch_accelerator.py", kind, "written", workers=1, servers=1)
    assert result.code != 0, result.output
    assert "the script has written to the weight 'wide.weight'" in result.output, result.output


HEAVY = """
import p3kv.torch
import sys, time
import torch
from torch import nn

kind = torch.accelerator.current_accelerator().type if sys.argv[1] == "any" else "cpu"
module = torch.get_device_module(kind)


class Heavy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        size = 600 if kind == "cpu" else 6000
        self.square = torch.randn(size, size, device=kind)

    def forward(self, x):
        for _ in range(10):
            self.square @ self.square
        return self.layers(x)


model = Heavy().to(kind)
x = torch.randn(4, 8, device=kind)
for _ in range(3):
    module.synchronize()
    began_s = time.monotonic()
    model(x)
    module.synchronize()
with open(sys.argv[2], "a") as told:
    print(time.monotonic() - began_s, file=told)
optimizer = p3kv.torch.Optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(100):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_compare_times_what_is_computed_and_not_when_it_is_asked_for(
    kind: str, tmp_path: Path
) -> None:
    """A script that computes alone never waits for an accelerator."""
    script = tmp_path / "train.py"
    script.write_text(HEAVY)
    told = tmp_path / "told"
    result = run(
        [str(PYTHON), "-m", "p3kv", "compare", "-s", "1", "--rounds", "1", "--steps",
         "8", "--", str(PYTHON), str(script), kind, str(told)], environment(), 200,
    )  # fmt: skip
    assert result.code == 0, result.output
    computes_s = min(map(float, told.read_text().split()))
    number, unit = re.findall(r"^computing alone +(\S+) (m?s) ", result.output, re.M)[0]
    step_s = float(number) * (0.001 if unit == "ms" else 1)
    assert step_s > 0.5 * computes_s, result.output


def test_servers_ask_no_accelerator_for_anything() -> None:
    """torch's own optimizers ask in each step whether a GPU's stream is captured, which takes
    memory of the GPU."""
    program = (
        "import torch\n"
        "from p3kv.frontends.torch.optimizers.optimizer_settings import (\n"
        "    BY_SLICE, BY_TENSOR, made, plain)\n"
        "def asked(*arguments, **named):\n"
        "    raise AssertionError('asked for an accelerator')\n"
        "torch.accelerator.current_accelerator = torch.cuda.is_available = asked\n"
        "for kind in [*BY_SLICE.values(), *BY_TENSOR.values()]:\n"
        "    weight = torch.nn.Parameter(torch.zeros(4, 4))\n"
        "    settings = plain(kind([weight], lr=0.1), {id(weight): 0}, 0, 1)\n"
        "    weight.grad = torch.ones(4, 4)\n"
        "    made(settings, settings.groups[0], weight).step()\n"
        "assert len(BY_SLICE) > 8\n"
    )
    result = run([str(PYTHON), "-c", program], environment(), 60)
    assert result.code == 0, result.output
