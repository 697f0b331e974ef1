"""`p3kv compare`: real scripts with each store, what they measure, and what is said of it."""

from __future__ import annotations

import io
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import psutil
import pytest

from experiments.cluster import Cluster, missing_requirements
from p3kv.config.trials import ALONE, FIFO, NATIVE, P3KV, LayerReady, Report
from p3kv.tools.compare import about_codecs, notes, outlook, table, verdict
from p3kv.tools.trials import Comparison, Output, StoreTimes, workload
from tests import sshd
from tests.jobs import ROOT, SCRIPTS, SUMS_ONLY, JobResult, environment, run
from tests.names import give_names
from tests.on_cluster import needs

COMPARE = [
    sys.executable,
    "-m",
    "p3kv",
    "compare",
    "-s",
    "1",
    "--rounds",
    "1",
    "--steps",
    "6",
    "--",
]


def compared(
    script: Path, *arguments: object, cwd: Path = ROOT, timeout_s: float = 100, **changes: object
) -> JobResult:
    """Runs a script with all stores."""
    command = [*COMPARE, sys.executable, str(script), *map(str, arguments)]
    env = environment(PWD=cwd, **changes)
    return run(["env", "-C", str(cwd), *command], env, timeout_s)


def rows(output: str) -> Dict[str, List[str]]:
    """The cells of the table, by store."""
    lines = output.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("computing alone"))
    last = lines.index("", first)
    cells = [re.split(r"  +", line.strip()) for line in lines[first:last]]
    return {name: numbers for name, *numbers in cells}


def processes_with(variable: str, value: str) -> List[int]:
    """Processes that have inherited a variable."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(variable) == value:
                found.append(process.pid)
    return found


def step_s(cell: str) -> float:
    number, unit = cell.split()
    return float(number) * {"s": 1.0, "ms": 1e-3}[unit]


def test_a_script_is_measured_with_every_store_and_nothing_of_it_is_shown(tmp_path: Path) -> None:
    result = compared(SCRIPTS / "short_training.py", 1000, cwd=tmp_path, **SUMS_ONLY)
    assert result.code == 0, result.output
    found = rows(result.output)
    assert list(found) == ["computing alone", "dist_sync", "p3kv, FIFO", "p3kv"]
    assert re.search(r"the others take some [\d.]+ m?s if all take as long", result.output)
    assert all(step_s(cells[0]) > 0 for cells in found.values())
    assert found["dist_sync"][2] == "1.00"
    assert step_s(found["dist_sync"][4]) > 0, result.output
    assert min(step_s(cell) for cell in found["p3kv"][4:6]) > 0, result.output
    for part in ("dist_sync", "p3kv"):
        assert f"round 1 of 1, {part}: " in result.output
    assert "step 1: norm" not in result.output and "p3kv-trial" not in result.output
    assert not list(tmp_path.iterdir()), "no checkpoint, whatever the script asks for"


@pytest.mark.long
def test_what_dist_sync_lacks_is_left_out_and_told(tmp_path: Path) -> None:
    """The script ends by itself, too, before the steps that were asked for."""
    settings = {"P3KV_GRADIENT_CODEC": "float16"}
    result = compared(SCRIPTS / "short_training.py", 8, cwd=tmp_path, **settings)
    assert result.code == 0, result.output
    assert "the script ends after 8 steps: 5 of them are measured, after 2" in result.output
    text = " ".join(result.output.split())
    assert "dist_sync does not clip by the global norm" in text
    assert "dist_sync can't save optimizer states" in text
    assert "dist_sync has no codec 'float16'" in text
    assert "No forecast for other networks: the simulator knows no sparse" in text


@pytest.mark.long
@pytest.mark.parametrize("name", ["image_classification", "module", "custom_loop"])
@pytest.mark.parametrize("on_servers", [1, 0])
def test_examples_are_compared_as_they_are(name: str, on_servers: int) -> None:
    script = ROOT / "examples" / f"{name}.py"
    result = compared(script, MXNET_UPDATE_ON_KVSTORE=on_servers)
    assert result.code == 0, result.output
    assert len(rows(result.output)) == 4


@pytest.mark.long
def test_an_example_that_dist_sync_can_t_train_is_compared_without_it() -> None:
    """MXNet's servers end with an error if a dense weight has sparse gradients."""
    result = compared(ROOT / "examples" / "language_model.py")
    assert result.code == 0, result.output
    assert list(rows(result.output)) == ["computing alone", "p3kv, FIFO", "p3kv"]
    text = " ".join(result.output.split())
    assert "dist_sync: the job failed" in text and "dist_sync can't train this script" in text
    assert "No forecast for other networks: the simulator knows no sparse gradients" in text


def test_a_script_that_fails_shows_its_own_words_and_ends_the_comparison() -> None:
    result = compared(SCRIPTS / "short_training.py", 1000, 3, **SUMS_ONLY)
    assert result.code == 3, result.output
    last = result.output.splitlines()[-2:]
    assert last[0].endswith("its script ended with exit code 3")
    assert last[1] == "p3kv compare: round 1 of 1, p3kv: the job failed, as its output says"
    assert "step 2: norm" in result.output


def test_a_codec_that_there_is_not_is_refused_before_anything_runs() -> None:
    command = [*COMPARE[:-1], "--codecs", "float16 zip", "--", "true"]
    result = run(command, environment(), 60)
    assert result.code == 2
    assert "there is no codec 'zip', only 2bit, bfloat16, dgc, " in result.output
    assert "trials" not in result.output


@pytest.mark.long
def test_too_few_steps_are_refused() -> None:
    result = compared(SCRIPTS / "short_training.py", 5, **SUMS_ONLY)
    assert result.code == 1
    assert "the script ended after 5 steps, and 8 are needed at least" in result.output


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import mxnet", "Does its script import p3kv, and use kvstore='p3'?"),
        ("import p3kv, mxnet", "the script ended without a step that p3kv has made"),
        (
            "import p3kv, mxnet; mxnet.kv.create('dist_async_p3')",
            "p3kv compare and p3kv tune time synchronous training",
        ),
        ("import p3kv; raise ValueError('boom')", "ValueError: boom"),
    ],
    ids=["no p3kv", "no step", "asynchronous", "an error"],
)
def test_a_script_that_can_t_be_compared_is_told_why(text: str, said: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    result = compared(script)
    assert result.code == 1 and said in result.output, result.output


@pytest.mark.long
def test_a_script_with_two_stores_is_compared_without_dist_sync(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import p3kv\n"
        "import mxnet as mx\n"
        "stores = [mx.kv.create('p3') for _ in range(2)]\n"
        "for store in stores:\n"
        "    store.init(0, mx.nd.ones(4))\n"
        "for step in range(100):\n"
        "    for store in stores:\n"
        "        store.pushpull(0, mx.nd.ones(4))\n"
    )
    result = compared(script, **SUMS_ONLY)
    assert result.code == 0 and "dist_sync allows one" in result.output, result.output
    assert list(rows(result.output)) == ["computing alone", "p3kv, FIFO", "p3kv"]


@pytest.mark.long  # other scripts are compared
def test_steps_count_in_which_a_worker_lacks_the_first_gradient(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import p3kv\n"
        "import mxnet as mx\n"
        "from mxnet import autograd, gluon\n"
        "rank = mx.kv.create('p3').rank\n"
        "both = [gluon.Parameter(name, shape=(4,), init='ones') for name in 'ab']\n"
        "for one in both:\n"
        "    one.initialize()\n"
        "trainer = gluon.Trainer(both, 'sgd', kvstore='p3')\n"
        "for step in range(30):\n"
        "    with autograd.record():\n"
        "        used = both[1:] if rank and step % 2 else both\n"
        "        loss = sum((one.data() for one in used), mx.nd.zeros(4))\n"
        "    loss.backward()\n"
        "    trainer.step(2, ignore_stale_grad=True)\n"
    )
    result = compared(script)
    assert result.code == 0, result.output
    assert "p3kv" in rows(result.output), result.output


@pytest.mark.long
def test_a_worker_that_fails_with_dist_sync_alone_does_not_hang_the_comparison(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import p3kv\n"
        "import mxnet as mx\n"
        "store = mx.kv.create('p3')\n"
        "store.init(0, mx.nd.ones(4))\n"
        "out = mx.nd.ones(4)\n"
        "for step in range(100):\n"
        "    if not isinstance(store.forward_order, list) and store.rank == step == 1:\n"
        "        raise ValueError('boom')\n"
        "    store.pushpull(0, mx.nd.ones(4), out=out)\n"
        "    out.wait_to_read()\n"
    )
    result = compared(script, **SUMS_ONLY)
    # Where nothing is sent, it fails as well.
    assert result.code == 1 and "ValueError: boom" in result.output, result.output
    assert "round 1 of 1, dist_sync: the job failed" in result.output
    assert "round 1 of 1, computing alone: the job failed" in result.output


@pytest.mark.long
def test_data_loaders_processes_end_with_a_trial(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = (ROOT / "examples" / "image_classification.py").read_text()
    text = text.replace("shuffle=True", "shuffle=True, num_workers=1")
    script.write_text(text.replace("net(x), y)", "net(x.copyto(mx.cpu())), y.copyto(mx.cpu()))"))
    result = compared(script, TEST_JOB_MARK=tmp_path)
    assert result.code == 0, result.output
    assert len(rows(result.output)) == 4
    assert not processes_with("TEST_JOB_MARK", str(tmp_path))


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(400)
@needs(missing_requirements(), sshd.missing())
def test_on_slow_links_p3kv_is_faster_and_the_forecast_is_near(tmp_path: Path) -> None:
    compute_s, sizes = 0.5, [65_536] * 16  # on links of 70 Mbit/s they take 0.5 s, too
    with Cluster(2, 70.0) as cluster, sshd.ssh_between(cluster, tmp_path) as path:
        give_names(cluster, ["n0", "n1"])
        process = cluster.hosts[0].popen(
            [
                sys.executable, "-m", "p3kv", "compare", "-H", "n0,n1", "--rounds", "1", "--steps",
                "15", "--codecs", "topk:share=0.01", "--", "python", str(SCRIPTS / "emulated.py"),
                str(compute_s), ",".join(map(str, sizes)),
            ],
            env=environment(PATH=f"{Path(sys.executable).parent}:{path}"),
            stdout=-1, stderr=-2, text=True,
        )  # fmt: skip
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    found = rows(output)
    assert step_s(found["computing alone"][0]) == pytest.approx(compute_s, rel=0.05)
    assert step_s(found["p3kv"][0]) < step_s(found["p3kv, FIFO"][0]), output
    assert step_s(found["p3kv"][0]) < 0.9 * step_s(found["dist_sync"][0]), output
    assert step_s(found["p3kv, topk:share=0.01"][0]) < 1.1 * compute_s < step_s(found["p3kv"][0])
    text = output.replace("\n", " ")
    assert "times as fast as dist_sync here" in text
    assert "With topk:share=0.01 a step is " in text and "Codecs change the numbers" in text
    for store in ("dist_sync", "p3kv, FIFO", "p3kv"):
        assert step_s(found[store][-1]) == pytest.approx(step_s(found[store][0]), rel=0.2), output


@pytest.mark.parametrize("shown", [None, io.BytesIO()])
def test_reports_are_taken_out_of_the_output_and_the_last_lines_are_kept_or_shown(
    shown: Optional[io.BytesIO],
) -> None:
    output = Output(shown)
    stream = output.stream()
    for piece in (
        b"worker 0  | \nworker 0  | p3kv-tr",
        b"ial .{}\n",
        b"worker 0  | one | two\nall",
    ):
        stream.write(piece)
    assert output.reports.newest == {"worker 0": Report()}
    lines = ["worker 0  | one | two"]
    if shown is None:
        assert output.last_lines == lines
    else:
        assert not output.last_lines and shown.getvalue().decode().splitlines() == lines


def measured(*steps_s: float, cpu_s: float = 0.25, **report: Any) -> StoreTimes:
    report.setdefault("layers", (LayerReady(0, 10_000_000, 0.0), LayerReady(1, 10_000_000, 0.1)))
    return StoreTimes(list(steps_s), [cpu_s], [[Report(**report)]])


def comparison(
    alone: float, native: Sequence[float], fifo: float, ours: Sequence[float]
) -> Comparison:
    return Comparison(
        2,
        {
            ALONE: measured(alone),
            NATIVE: measured(*native, notes=("one", "two")),
            FIFO: measured(fifo, notes=("one",), server_s=0.02),
            P3KV: measured(*ours, link_bytes_s=1e6, server_s=0.02, native="dist_sync"),
        },
    )


def test_the_table_has_what_was_measured() -> None:
    found = comparison(0.3, (0.6, 0.61, 0.7), 0.5, (0.4, 0.4, 0.39))
    heads, *lines = [re.split(r"  +", line) for line in table(found, None)]
    processors = ["worker CPU", "server CPU"]
    assert heads == ["", "step", "steps/s", "speed-up", "waiting", *processors, "spread"]
    assert lines[0] == ["computing alone", "0.3 s", "3.33", "0.25 s"]
    assert lines[1] == ["dist_sync", "0.61 s", "1.64", "1.00", "51%", "0.25 s", "16%"]
    assert lines[3] == ["p3kv", "0.4 s", "2.5", "1.52", "25%", "0.25 s", "20 ms", "3%"]
    assert notes(found) == ["one", "two"]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (comparison(0.3, (0.6,), 0.5, (0.4,)), "p3kv is 1.50 times as fast as dist_sync here: 25%"),
        (comparison(0.3, (0.6,), 0.5, (0.4,)), "instead of 50%. Of this, a factor of 1.25 is what"),
        (comparison(0.3, (0.31,), 0.31, (0.31,)), "as fast as dist_sync here: with dist_sync only"),
        (comparison(0.3, (0.6,), 0.6, (0.6,)), "here: 50% of a step is waiting with p3kv, too."),
        (comparison(0.3, (0.4,), 0.8, (0.8,)), "A step takes 2.00 times as long with p3kv"),
        (comparison(0.3, (0.5, 0.7), 0.5, (0.55,)), "The rounds are up to 33% apart"),
    ],
)
def test_the_verdict_says_whether_p3kv_helps(found: Comparison, said: str) -> None:
    assert said in verdict(found)


@pytest.mark.parametrize(
    ("step_s", "said"),
    [
        (0.2, "With float16 a step is 2.00 times as fast as with exact p3kv. Codecs change"),
        (0.39, "No codec makes a step faster here by more than the rounds differ"),
    ],
)
def test_the_fastest_codec_is_told_if_it_is_worth_anything(step_s: float, said: str) -> None:
    found = comparison(0.3, (0.6,), 0.5, (0.4,))
    assert about_codecs(found) == ""
    found.measured["p3kv, 2bit"] = measured(0.39)
    found.measured["p3kv, float16"] = measured(step_s)
    assert said in about_codecs(found)


def test_a_codec_pays_where_exact_arrays_take_longer_than_computing_and_than_its_work() -> None:
    found = comparison(0.3, (0.6,), 0.5, (0.4,))
    found.measured["p3kv, cheap"] = measured(0.2, cpu_s=0.24, server_s=0.03)
    found.measured["p3kv, dear"] = measured(0.2, cpu_s=0.35, server_s=0.62)
    # 2 workers send and receive 20 MB, which take 0.3 s at 557 Mbit/s, of which 533 are payload.
    text = about_codecs(found)
    assert "cheap on links below 557 Mbit/s (10 ms more of a processor in each step)" in text
    assert "dear on links below 279 Mbit/s (0.6 s more of a processor in each step)" in text


def test_there_is_no_forecast_for_hosts_with_several_workers() -> None:
    found = comparison(0.3, (0.6,), 0.5, (0.4,))._replace(shares_links=True)
    assert found.forecast() is None
    assert outlook(found, None) == [
        "No forecast for other networks: the simulator knows hosts with one worker each."
    ]


def test_there_is_no_forecast_where_the_numbers_say_nothing() -> None:
    found = comparison(0.3, (0.5, 0.7), 0.5, (0.55,))
    assert "this says nothing" in verdict(found)
    assert outlook(found, None) == [
        "No forecast for other networks: it would rest on these numbers."
    ]


def test_layers_are_those_of_the_gradients_in_reverse() -> None:
    """Three layers of 0.1 s going backward, then 0.15 s forward and 0.05 s for other things."""
    layers = [LayerReady(7, 40, 0.0), LayerReady(3, 80, 0.1), LayerReady(5, 4, 0.2)]
    found = workload(layers, 0.65)
    assert found.arrays == [[], [(5, 1)], [(3, 20)], [(7, 10)]]
    assert found.backward_s == pytest.approx([0.0, 0.1, 0.1, 0.1])
    assert found.forward_s == pytest.approx([0.05, 0.1, 0.1, 0.1])
    assert workload(layers, 0.45).forward_s == pytest.approx([0.0, 0.05, 0.05, 0.05])


def test_layers_are_alike_if_all_gradients_are_ready_at_once() -> None:
    layers = [LayerReady(key, 40, key * 1e-5) for key in range(3)]
    found = workload(layers, 0.9)
    assert found.backward_s == pytest.approx([0.0, 0.2, 0.2, 0.2])
    assert found.forward_s == pytest.approx([0.0, 0.1, 0.1, 0.1])
