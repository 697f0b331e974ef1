"""Measured figures: the smallest one end to end, resumed, and what is made of recorded numbers."""

from __future__ import annotations

import json
import re

import matplotlib.pyplot as plt
import pytest

from experiments import encryption, figure7, figure10, figure12, overhead, tracing
from experiments.campaign import campaign, machine, options
from experiments.campaign.campaign import Campaign, Point
from experiments.campaign.records import Records
from experiments.cluster import missing_requirements
from experiments.drawing import curves
from experiments.drawing.by_share import draw, summarize, table_text
from experiments.models import load
from tests.experiments.pictures import assert_is_picture

_PROBLEM = missing_requirements()
needs_cluster = pytest.mark.skipif(_PROBLEM is not None, reason=str(_PROBLEM))

_SMALLEST = [
    "--models", "three_layers", "--hosts", "2", "--ratios", "1", "--systems", "dist_sync", "p3kv",
    "--repetitions", "1", "--warm-up", "1", "--iterations", "2",
]  # fmt: skip


def _document(folder, name="figure7"):
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.long
@needs_cluster
def test_the_smallest_figure_is_measured_resumed_and_drawn(tmp_path, monkeypatch, capsys):
    measured = []

    def stop_after_one(cluster, system, model, **how):
        if measured:
            raise KeyboardInterrupt
        measured.append(system)
        return real(cluster, system, model, **how)

    real = campaign.measure
    command = [*_SMALLEST, "--output", str(tmp_path)]
    monkeypatch.setattr(campaign, "measure", stop_after_one)
    with pytest.raises(SystemExit, match="the same command goes on"):
        figure7.main(command)
    assert [run["system"] for run in _document(tmp_path)["runs"]] == measured

    def count(cluster, system, model, **how):
        measured.append((system, cluster.hosts[0].rate_mbit_s))
        return real(cluster, system, model, **how)

    monkeypatch.setattr(campaign, "measure", count)
    figure7.main(command)
    document = _document(tmp_path)
    runs = document["runs"]
    rate = runs[-1]["rate_mbit_s"]
    # In turn, and the run that was complete was not measured again.
    in_turn = [("dist_sync", None), ("p3kv", None), ("dist_sync", rate), ("p3kv", rate)]
    assert [(run["system"], run["rate_mbit_s"]) for run in runs] == in_turn
    assert measured == ["dist_sync", *in_turn[1:]]
    compute_s = load("three_layers").compute_s
    for run in runs:
        assert "failures" not in run
        assert len(run["iteration_s"]) == 2
        assert min(run["iteration_s"]) > 0.98 * compute_s
        assert run["compute_s"] == pytest.approx(compute_s)
    (described,) = document["machines"]
    assert len(described["starts"]) == 2
    assert {"cpu", "cores", "memory_gib", "kernel", "python", "mxnet", "p3kv", "git_commit",
            "congestion_control"} <= set(described)  # fmt: skip
    checked = {check["rate_mbit_s"]: check for check in document["links"]}
    assert set(checked) == {None, rate}
    assert len(checked[rate]["mbit_s"]) == 2
    row = document["summary"][0]
    assert set(row["unlimited_efficiency"]) == {"dist_sync", "p3kv"}
    assert set(row["speed_ups"]) == {"dist_sync"}
    assert row["by_rate"][0]["ratio"] == pytest.approx(1, abs=0.01)
    assert_is_picture(tmp_path / "figure7.png")
    assert "Speed-up of p3kv" in capsys.readouterr().out

    measured.clear()
    figure7.main(command)
    assert measured == []
    assert _document(tmp_path)["runs"] == runs


@pytest.mark.long
@needs_cluster
def test_what_goes_wrong_is_kept_and_measured_again_when_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "LINK_TOLERANCE", -1.0)  # as if every link were off
    good = Point("three_layers", 2, 500.0, 1.0, ("p3kv",), 1)
    bad = good._replace(settings=(("P3KV_SLICE_SIZE", "none"),))
    records = Records(tmp_path / "failures.json", {})
    with Campaign(records, warm_up=1) as measuring:
        with monkeypatch.context() as patch:
            patch.setattr(machine, "available_bytes", lambda: 0)
            measuring.measure([good], 1)
        (run,) = records.runs
        assert "iteration_s" not in run and "of memory" in run["failures"][0]
        measuring.measure([good], 1)
        assert records.runs == [run]
        measuring.measure([bad, good], 1, retry=True)
    kept = Records(records.path, {})
    failed, run = kept.runs
    assert len(failed["failures"]) == 2
    assert all("P3KV_SLICE_SIZE" in reason for reason in failed["failures"])
    assert "iteration_s" not in failed
    assert len(run["iteration_s"]) == 1 and "failures" not in run
    (check,) = kept.links
    assert check["flagged"] and check["attempts"] == 2 and len(check["mbit_s"]) == 2
    assert curves.remarks([], kept.links)[0].endswith("2 hosts, 500 Mbit/s")


# The command line


def test_quick_runs_stay_apart_and_defaults_are_stated():
    parser = options.parser("a figure", ("resnet50", "vgg19"))
    full = options.parse(parser, ["--dilation", "2", "vgg19=3"], ("resnet50", "vgg19"))
    assert (full.models, full.repetitions, full.iterations) == (["resnet50", "vgg19"], None, 3)
    assert (full.dilation["resnet50"], full.dilation["vgg19"]) == (2.0, 3.0)
    quick = options.parse(parser, ["--quick"], ("resnet50", "vgg19"))
    assert (quick.models, quick.iterations) == (["resnet50"], 3)
    assert quick.dilation == campaign.DILATION
    slower = options.parser("a figure", ("resnet50", "vgg19"), dilation={"resnet50": 3, "vgg19": 1})
    assert options.parse(slower, [], ("resnet50",)).dilation == {"resnet50": 3, "vgg19": 1}
    given = options.parse(slower, ["--dilation", "vgg19=2"], ("resnet50",))
    assert given.dilation == {"resnet50": 3, "vgg19": 2}
    paths = [options.numbers_path(chosen, "figure7").name for chosen in (full, quick)]
    assert paths == ["figure7.json", "figure7-quick.json"]


@pytest.mark.parametrize("given", ["0", "nought", "lenet=2", "-1", "inf"])
def test_dilations_that_make_no_sense_are_refused(given, capsys):
    with pytest.raises(SystemExit):
        options.parser("a figure", ("resnet50",)).parse_args([f"--dilation={given}"])
    assert "--dilation" in capsys.readouterr().err


def test_rates_have_the_ratio_that_was_asked_for():
    for ratio in figure7.RATIOS:
        at = campaign.point("vgg19", 4, ratio, 2.0, ("p3kv",), 5)
        assert at.wire_s / at.compute_s == pytest.approx(ratio, rel=1e-3)
        assert at.iterations == (5 if ratio <= 1 else 3)


# The file


def test_a_file_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "figure7.json"
    for text in ("{", "[]", '{"format": 99}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="move it away"):
            Records(path, {})
        assert path.read_text() == text


def test_another_commit_gets_its_own_place(tmp_path):
    records = Records(tmp_path / "figure7.json", {})
    one = {"cpu": "of some kind", "git_commit": "1"}
    two = {**one, "git_commit": "2"}
    assert [records.begin(each) for each in (one, two, one)] == [0, 1, 0]
    kept = Records(records.path, {}).machines
    assert [len(each["starts"]) for each in kept] == [2, 1]


# What is made of recorded numbers


def _run(system, rate_mbit_s, seconds, repetition=0, model="resnet50", hosts=4, **changes):
    dilation = changes.get("dilation", 4.0)
    return {
        "model": model,
        "system": system,
        "hosts": hosts,
        "rate_mbit_s": rate_mbit_s,
        "dilation": dilation,
        "settings": {},
        "congestion_control": "cubic",
        "warm_up": 2,
        "iterations": 3,
        "repetition": repetition,
        "machine": 0,
        "compute_s": load(model).compute_s * dilation,
        # The middle one is the median.
        "iteration_s": [seconds + 1.0, seconds, seconds - 0.1],
        **changes,
    }


def _rate(ratio):
    return campaign.point("resnet50", 4, ratio, 4.0, (), 3).rate_mbit_s


@pytest.fixture
def hand_made(tmp_path):
    """p3kv against two systems at two rates; dist_sync is furthest behind at M/C 2."""
    one, two = _rate(1), _rate(2)
    records = Records(tmp_path / "figure7.json", {"figure": "made by hand"})
    for run in (
        _run("p3kv", None, 4.9),
        _run("dist_sync", None, 5.2),
        *(_run("p3kv", one, seconds, at) for at, seconds in enumerate((5.0, 5.2, 5.1))),
        *(_run("dist_sync", one, seconds, at) for at, seconds in enumerate((6.12, 6.12, 6.12))),
        _run("p3kv", two, 10.0),
        *(_run("dist_sync", two, seconds, at) for at, seconds in enumerate((15.0, 14.0, 20.0))),
        *(_run("mxnet_p3", one, seconds, at) for at, seconds in enumerate((5.61, 5.5, 5.7))),
    ):
        records.add_run(run)
    failed = {**_run("mxnet_p3", two, 1.0), "failures": ["it said\nRunFailed: so it was"] * 2}
    del failed["iteration_s"]
    records.add_run(failed)
    return records


def test_speed_ups_are_taken_where_they_are_greatest(hand_made):
    (row,) = figure7.summarize(hand_made.runs)
    assert row["paper_speed_up"] == 0.26
    gain = row["speed_ups"]["dist_sync"]
    assert gain["speed_up"] == pytest.approx(0.5)  # 15 s against 10 s; at M/C 1 it is 20 %
    assert (gain["low"], gain["high"]) == (pytest.approx(0.4), pytest.approx(1.0))
    assert gain["ratio"] == pytest.approx(2, abs=0.01)
    gain = row["speed_ups"]["mxnet_p3"]  # which has failed at M/C 2
    assert gain["speed_up"] == pytest.approx(0.1)
    assert (gain["low"], gain["high"]) == (
        pytest.approx(5.5 / 5.2 - 1, abs=1e-4),
        pytest.approx(5.7 / 5.0 - 1, abs=1e-4),
    )
    assert "dist_sync_apart" not in row["speed_ups"]
    text = figure7.table_text([row])
    assert "+50% at M/C = 2" in text and "+10% at M/C = 1" in text and "26%" in text


def test_p3kv_is_compared_with_the_bound(hand_made):
    (row,) = figure7.summarize(hand_made.runs)
    excess = {round(at["ratio"]): at["over_bound"] for at in row["by_rate"]}
    # At M/C 2 nothing can hide the wire time of 9.76 s but the passes of the last layer.
    assert excess[2] == pytest.approx(10.0 / (2 * 4 * 1.22) - 1, abs=0.01)
    assert excess[1] == pytest.approx(5.1 / (4 * 1.22) - 1, abs=0.01)


def test_p3kv_is_compared_with_the_best_of_mxnets_stores(hand_made):
    (row,) = figure7.summarize(hand_made.runs)
    gain = {round(at["ratio"]): at["over_best_peer"] for at in row["by_rate"]}
    assert gain[1] == pytest.approx(5.61 / 5.1 - 1, abs=1e-4)
    assert gain[2] == pytest.approx(15.0 / 10.0 - 1, abs=1e-4)  # mxnet_p3 has failed there
    assert "best peer" in figure7.table_text([row])


def test_what_the_machine_does_not_carry_is_flagged(hand_made):
    (row,) = figure7.summarize(hand_made.runs)
    assert row["unlimited_efficiency"] == {
        "dist_sync": pytest.approx(4.88 / 5.2, abs=1e-4),
        "p3kv": pytest.approx(4.88 / 4.9, abs=1e-4),
    }
    assert row["limited_by_this_machine"]
    assert "limited by this machine" in figure7.table_text([row])
    figure = figure7.draw(hand_made)
    texts = " ".join(text.get_text() for text in figure.axes[0].texts)
    plt.close(figure)
    assert "limited by this machine" in texts


def test_failures_and_weak_links_are_told(hand_made):
    hand_made.add_links({"hosts": 4, "rate_mbit_s": 100.0, "most_off": 0.2, "flagged": True})
    hand_made.add_links({"hosts": 4, "rate_mbit_s": 200.0, "most_off": 0.2, "flagged": True})
    hand_made.add_links({"hosts": 4, "rate_mbit_s": 200.0, "most_off": 0.0, "flagged": False})
    failed, weak = curves.remarks(hand_made.runs, hand_made.links)
    assert failed.startswith("failed: mxnet_p3, resnet50") and failed.endswith("so it was")
    assert "20.0%" in weak and "100 Mbit/s" in weak


def test_all_of_a_file_is_drawn(hand_made):
    hand_made.add_run(_run("p3kv", 500.0, 9.3, model="vgg19", dilation=1.0))
    assert [setup.model for setup in figure7.setups(hand_made.runs)] == ["resnet50", "vgg19"]
    curves.finish(hand_made, figure7.draw(hand_made))
    assert_is_picture(hand_made.path.with_suffix(".png"))


def test_horovod_is_told_and_drawn_where_it_was_measured(hand_made):
    assert "horovod" not in figure7.table_text(figure7.summarize(hand_made.runs))
    hand_made.add_run(_run("horovod", _rate(1), 6.63))
    assert "+30% at M/C = 1" in figure7.table_text(figure7.summarize(hand_made.runs))
    figure = figure7.draw(hand_made)
    labels = figure.axes[0].get_legend_handles_labels()[1]
    plt.close(figure)
    assert "Horovod with gloo" in labels


def test_figure_10_undoes_the_dilation_and_says_what_the_machine_is_too_small_for(tmp_path):
    setup = figure10.Setup("resnet50", 4.0, "cubic", 1.0)
    records = Records(tmp_path / "figure10.json", {})
    for hosts, free_s in ((2, 2.45), (4, 4.95), (8, 10.9)):
        dilation = 1.0 * hosts
        rate = setup.point(hosts, True, (), 3).rate_mbit_s
        for system, factor in (("p3kv", 1.25), ("dist_sync", 1.5)):
            how = {"hosts": hosts, "dilation": dilation}
            records.add_run(_run(system, None, free_s, **how))
            records.add_run(_run(system, rate, 1.22 * dilation * factor, **how))
    full = _run("p3kv", None, 1.0, hosts=16, dilation=16.0)
    del full["iteration_s"]
    records.add_run({**full, "failures": ["needs about 99 GB of memory"]})
    (row,) = figure10.summarize(records, [2, 4, 8, 16])
    limited, failed = figure10.table_text([row]).splitlines()[-2:]
    assert limited.startswith("limited by this machine with 8 hosts") and "0.895" in limited
    assert failed.startswith("16 hosts do not run") and failed.endswith("99 GB of memory")
    by_hosts = {size["hosts"]: size for size in row["sizes"]}
    assert by_hosts[4]["linear"] == pytest.approx(128 / 1.22, abs=0.01)
    assert by_hosts[4]["measured"]["p3kv"]["median"] == pytest.approx(128 / 1.22 / 1.25)
    assert by_hosts[4]["speed_ups"]["dist_sync"] == pytest.approx(0.2)
    assert by_hosts[16]["measured"] == {}
    for size in row["sizes"]:
        ours, theirs = size["simulated"]["p3kv"], size["simulated"]["dist_sync_apart"]
        assert theirs <= ours * 1.01 <= size["bound"] * 1.02 <= size["linear"] * 1.03
    before = len(records.simulated)
    assert figure10.summarize(Records(records.path, {}), [2, 4, 8, 16]) == [row]
    assert len(records.simulated) == before == 12
    curves.finish(records, figure10.draw(records.summary or [row], []))
    assert_is_picture(tmp_path / "figure10.png")


def test_figure_12_has_a_point_for_every_size(tmp_path):
    records = Records(tmp_path / "figure12.json", {})
    for elems, free_s in ((10_000, 5.2), (50_000, 4.9)):
        settings = {"P3KV_SLICE_SIZE": str(elems)}
        records.add_run(_run("p3kv", None, free_s, settings=settings))
        records.add_run(_run("p3kv", _rate(1), 5.0, settings=settings))
    (row,) = figure12.summarize(records)
    assert [size["slice_elems"] for size in row["sizes"]] == [10_000, 50_000]
    assert row["sizes"][1]["measured"]["median"] == pytest.approx(128 / 5.0)
    assert row["sizes"][1]["simulated"] == pytest.approx(row["bound"], rel=0.03)
    text = figure12.table_text([row])
    assert text.count("limited by this machine") == 1
    curves.finish(records, figure12.draw([row], []))
    assert_is_picture(tmp_path / "figure12.png")


# What synchronising costs


def _round(system, model, seconds, cpu_s, **changes):
    return {
        "model": model,
        "system": system,
        "hosts": 4,
        "iteration_s": [seconds] * 5,
        "cpu_s": cpu_s,
        "worker_rss_kib": 500 << 10,
        "arrays_rss_kib": 450 << 10,
        "server_rss_kib": 300 << 10,
        "idle_server_rss_kib": 200 << 10,
        **changes,
    }


def test_rounds_memory_and_steps_are_set_beside_the_peers():
    runs = [
        _round("dist_sync", "resnet50_at_once", 0.4, 10.0),
        _round("p3kv", "resnet50_at_once", 0.3, 4.0),
        _round("p3kv", "resnet50_at_once", 0.2, 4.0),
        _round("dist_sync", "resnet50", 8.0, 5.0, ratio=4.0),
        _round("p3kv", "resnet50", 6.0, 7.0, ratio=4.0),
        {
            "system": "p3kv",
            "model": "resnet50",
            "parameters": 100,
            "pending_step_s": [0.002, 0.001, 0.004],
            "ready_step_s": [0.003],
        },
        {"system": "dist_sync", "case": "1 key", "hosts": 1, "round_trip_s": [0.001] * 3},
        {"system": "p3kv", "case": "1 key", "hosts": 1, "round_trip_s": [0.001, 0.002, 0.009]},
    ]
    lines = overhead.report(runs).splitlines()
    mine = [line.split() for line in lines if line.startswith("resnet50_at_once")]
    peer, ours, beyond = mine[0], mine[1], mine[-1]
    gigabytes = 5 * 4 * load("resnet50").size_bytes / 1e9
    assert float(peer[-1]) == pytest.approx(10.0 / gigabytes, abs=0.01)
    assert (ours[2], ours[-2]) == ("250.0", "0.62")  # medians; 0.25 s of 0.4 s
    (limited,) = (line.split() for line in lines if re.match("ResNet-50, M/C = 4 +p3kv", line))
    assert (limited[5], limited[-2]) == ("6000.0", "0.75")
    assert float(limited[-1]) == pytest.approx(7.0 / gigabytes, abs=0.01)
    part_mib = load("resnet50").size_bytes / 4 / 2**20
    assert beyond[2:] == ["50", f"{100 - 2 * part_mib:.0f}"]
    trip = next(line.split() for line in lines if re.match("1 key +p3kv", line))
    assert (trip[3], trip[-1]) == ("2.00", "2.00")
    assert [line.split()[-2:] for line in lines[-2:]] == [["20.0", "40.0"], ["30.0", "30.0"]]


def test_the_cost_of_encryption_is_told_for_each_case_by_the_bytes_that_are_sent():
    case = encryption.CASES[0]
    runs = [
        {**case._asdict(), "encrypt": encrypt, "hosts": 2, "iteration_s": [s] * 5, "cpu_s": cpu_s}
        for encrypt, s, cpu_s in ((0, 0.5, 4.0), (1, 0.8, 9.0), (0, 0.3, 3.0), (0, 0.4, 5.0))
    ]
    without, encrypted = (line.split() for line in encryption.report(runs).splitlines()[1:])
    gibibytes = 5 * 2 * 2 * load("resnet50").size_bytes / 2**30
    assert without[:6] == [case.model, "none", "0", "0.400", "s", "0.300"]
    assert float(without[-4]) == pytest.approx(4.0 / gibibytes, abs=0.01)
    assert float(encrypted[-4]) == pytest.approx(9.0 / gibibytes, abs=0.01)


def test_the_cost_of_a_trace_is_told_by_records():
    runs = [
        {"traced": traced, "cpu_s": cpu_s, "records": 1000 * traced}
        for traced, cpu_s in ((False, 0.1), (True, 0.103), (False, 0.2), (True, 0.201))
    ]
    assert "with 1000 records: 2.0 us each (1.0 to 3.0)" in tracing.report(runs)
    assert tracing.report(runs[:1]) == "not measured yet"


def _of_rows(system, way, rows, share, seconds, rate=25.0, **more):
    return {
        "system": system, "way": way, "rows": rows, "share": share, "rate_mbit_s": rate,
        "iteration_s": seconds, "link_bytes": 2_000_000, "columns": 512, **more,
    }  # fmt: skip


def test_sparse_rows_are_summed_up_and_drawn_by_the_share_of_touched_rows(tmp_path):
    runs = [
        _of_rows("p3kv", "rows", 400, 0.01, [3.0, 2.0, 2.5], sent_share=1.01, received_share=1.0),
        _of_rows("p3kv", "rows", 400, 0.01, [1.0, 1.0, 1.0], sent_share=1.02, received_share=1.0),
        _of_rows("p3kv", "rows", 100, 0.5, [0.5]),
        _of_rows("p3kv", "rows", 100, 1.0, [1.0]),
        _of_rows("dist_sync", "dense", 100, 1.0, [1.5]),
        _of_rows("p3kv", "rows", 400, 0.01, [0.5], None),
    ]
    table = summarize(runs)
    text = table_text(table)
    known = (
        "400 x 512 rows  0.01      25.0 p3kv      1.750 s (1.000 to 2.500), link 2.0 MB 1.020 1.000"
    )
    assert known in text and "no limit p3kv      0.500 s" in text
    assert len(text.splitlines()) == 5
    figure = draw(table)
    figure.savefig(tmp_path / "figure.png")
    plt.close(figure)
    assert_is_picture(tmp_path / "figure.png")
