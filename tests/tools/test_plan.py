"""`p3kv plan`: quantities with units, the table, and what it means."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Callable, List

import matplotlib.pyplot as plt
import pytest
from mxnet.gluon.model_zoo import vision

from p3kv.frontends.mxnet.front_end import MXNet
from p3kv.report.forecast import Layer, Model, Parameter
from p3kv.tools import plan
from p3kv.tools.cli import main
from p3kv.tools.commands.arguments import bandwidth, duration
from tests.jobs import SCRIPTS, SUMS_ONLY, environment, run

P3KV = [sys.executable, "-m", "p3kv"]
ASKED = ["--model", "resnet18_v1", "--batch", "32", "--compute", "300ms", "--hosts", "4"]
_ARRAYS = tuple(Parameter(f"layer{n}", (1000, 1000) if n else (10, 10)) for n in range(5))
SMALL = Model("small", 10, 0.1, tuple(Layer(one.name, (one,), 1.0) for one in _ARRAYS), _ARRAYS)
"""16 MB, of which each direction of a link carries 2 (n-1)/n. The first layer is tiny."""


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (bandwidth, "10gbit", 10e9), (bandwidth, "2.5 Gbit/s", 2.5e9), (bandwidth, ".5tbit", 5e11),
        (bandwidth, "800Mbit", 8e8), (duration, "0.3s", 0.3), (duration, " 300 ms", 0.3),
        (duration, "250us", 2.5e-4), (duration, "2min", 120.0),
    ],
)  # fmt: skip
def test_quantities_have_units(read: Callable[[str], float], text: str, expected: float) -> None:
    assert read(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("read", "text", "problem"),
    [
        (bandwidth, "10", "'10' has no unit; write kbit, mbit, gbit or tbit after"),
        (bandwidth, "10GB", "'GB' in '10GB' is no unit of a bandwidth; write kbit"),
        (bandwidth, "fast", "'fast' is no bandwidth; write a number and kbit, .* such as 10gbit"),
        (bandwidth, "-1gbit", "'-1gbit' is no bandwidth"),
        (bandwidth, "0gbit", "'0gbit' is no bandwidth that anything has"),
        (duration, "0.3", "'0.3' has no unit; write us, ms, s or min after"),
        (duration, "3ms/s", "'3ms/s' is no time"),
        (duration, "1e3s", "'1e3s' is no time"),
    ],
)
def test_what_is_no_quantity_is_refused_with_an_example(
    read: Callable[[str], float], text: str, problem: str
) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=problem):
        read(text)


def _predicted(hosts: int, rate: float) -> plan.Series:
    return plan.predict(SMALL.workload, SMALL.batch_size, hosts, rate)


def _cells(lines: List[str]) -> List[List[str]]:
    return [line.replace("bit/s", "").replace("FIFO", "").split() for line in lines if line]


def test_the_table_has_hosts_and_bandwidths_around_the_asked_ones() -> None:
    series = _predicted(4, 1e9)
    heads, *rows = _cells(plan.table(series))
    assert heads[:3] == ["hosts", "bandwidth", "dist_sync"]
    asked = [row[1:] for row in rows if row[0] == ">"]
    assert len(asked) == 2 and asked[0] == asked[1] and asked[0][:3] == ["4", "1", "G"]
    others = [row for row in rows if row[0] != ">"]
    assert [row[:3] for row in others] == [
        ["2", "1", "G"], ["8", "1", "G"], ["16", "1", "G"],
        ["4", "250", "M"], ["4", "500", "M"], ["4", "2", "G"], ["4", "4", "G"],
    ]  # fmt: skip
    for row in rows:
        dist_sync, fifo, p3kv, bound = (float(cell.rstrip("*")) for cell in row[-5:-1])
        assert 0 < dist_sync <= p3kv <= bound and 0 < fifo <= p3kv
        assert float(row[-1]) == pytest.approx(p3kv / dist_sync, abs=0.015)
        assert ("*" in "".join(row)) == (row[0] == "16")


def test_advice_says_whether_the_network_is_the_limit() -> None:
    free, slow = (_predicted(4, rate).asked for rate in (1e12, 1e8))
    # 24 MB each way, of which TCP leaves 0.957 of the link: 2.006 s, and 0.02 s for the last layer.
    assert slow.forecast.bound_s == pytest.approx(2.006 + 0.02, abs=0.01)
    assert plan.advice(free).startswith("On 4 hosts with 1e+03 Gbit/s the network is not the limit")
    said = plan.advice(slow)
    assert "the network is the limit: with dist_sync 9" in said and "only more bandwidth" in said
    between = plan.advice(_predicted(2, 2e9).asked)
    assert "and computing would be the limit" in between, between


def test_a_model_of_the_zoo_has_a_table_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.png"
    assert main(["plan", *ASKED, "--bandwidth", "1gbit", "--plot", str(path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "resnet18_v1: 11.7 million parameters, 46.8 MB; 4 hosts that never wait: "
    )
    assert "optimistic: processors cost nothing" in said and "taken as balanced" in said
    assert max(map(len, said.splitlines())) <= 80 + len(str(path))
    height, width, _ = plt.imread(path).shape
    assert width > height > 400


def test_an_unknown_model_is_refused_with_the_nearest_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = ["plan", "--model", "ResNet18", *ASKED[2:], "--bandwidth", "1gbit"]
    assert main(wrong) == 2
    said = capsys.readouterr().err
    assert said.startswith("p3kv plan: there is no model 'ResNet18'; did you mean resnet18_v")


def test_models_that_shells_complete_are_those_of_the_zoo() -> None:
    with pytest.raises(ValueError) as told:
        vision.get_model("")
    assert [*MXNet.model_names] == str(told.value).partition("\n")[2].split()


def test_a_script_s_own_layers_are_measured_alone() -> None:
    script = [sys.executable, str(SCRIPTS / "emulated.py"), "0.1", "65536,262144"]
    asked = ["--batch", "8", "--hosts", "4", "--bandwidth", "100mbit"]
    result = run(
        [*P3KV, "plan", "--script", shlex.join(script), *asked], environment(**SUMS_ONLY), 100
    )
    assert result.code == 0, result.output
    assert "0.328 million parameters, 1.31 MB; 4 hosts that never wait: " in result.output
    samples_s = float(re.search(r"never wait: (\d+) samples/s", result.output)[1])
    assert samples_s == pytest.approx(8 * 4 / 0.1, rel=0.2)
    assert "Each layer computes as long as it did here, with nothing" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "vgg19"], "--model needs --compute"),
        (["--script", "true", "--compute", "1s"], "--script measures what --compute would say"),
        (["--script", "python 'train.py"], "No closing quotation"),
        (["--script", "true"], "did not import p3kv"),
    ],
)
def test_a_plan_for_a_script_says_what_is_wrong_with_it(words: List[str], said: str) -> None:
    asked = ["--batch", "8", "--hosts", "4", "--bandwidth", "100mbit"]
    result = run([*P3KV, "plan", *words, *asked], environment(), 60)
    assert result.code == 2 and said in result.output, result.output
    assert "Traceback" not in result.output


def test_a_plot_needs_matplotlib_and_a_kind_of_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plot = ["plan", *ASKED, "--bandwidth", "1gbit", "--plot"]
    assert main([*plot, str(tmp_path / "plan.doc")]) == 2
    assert "plan.doc: Format 'doc' is not supported" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "p3kv.tools.pictures", raising=False)
    assert main([*plot, str(tmp_path / "plan.png")]) == 2
    assert "pip install 'p3kv[plots]'" in capsys.readouterr().err


def test_one_host_has_nothing_to_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *ASKED[:-1], "1", "--bandwidth", "1gbit"])
    assert "one host has no network to plan for" in capsys.readouterr().err
