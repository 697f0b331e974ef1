"""Scripts for torch's DistributedDataParallel as they are: with torch alone, and with p3kv."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

import pytest

from tests.jobs import JOB_S, ROOT, SCRIPTS, JobResult, environment, held_port, run, run_with_gloo
from tests.torch_environment import NEEDS_TORCH, PYTHON

pytestmark = NEEDS_TORCH

AS_IT_IS = ROOT / "experiments" / "as_it_is"
Losses = Dict[Tuple[int, int], float]
"""By rank and step."""


def losses(script: Path, *modules: str, args: Sequence[str] = (), **settings: object) -> Losses:
    """What a script's two ranks print, in these modules' hands. They start as torchrun starts them,
    and need not wait for its own imports."""
    ranks = 'RANK=0 LOCAL_RANK=0 "$@" & RANK=1 LOCAL_RANK=1 "$@" && wait $!'
    command = ["bash", "-c", ranks, "ranks", str(PYTHON), *modules, str(script), *args]
    with held_port() as holder:
        port = holder.getsockname()[1]
        env = environment(
            P3KV_SECRET="", WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, MASTER_ADDR="localhost",
            MASTER_PORT=port, **settings,
        )  # fmt: skip
        return said(run_with_gloo(command, env, JOB_S))


def launched(script: str, *checks: str, servers: int = 2, **settings: str) -> JobResult:
    """What `p3kv launch` makes of a script that wraps its model."""
    command = [
        str(PYTHON), "-m", "p3kv", "launch", "-n", "2", "-s", str(servers), "--", str(PYTHON),
        "-m", "p3kv", "run", "--ddp", str(SCRIPTS / script), *checks,
    ]  # fmt: skip
    return run_with_gloo(command, environment(**settings), JOB_S)


def said(result: JobResult) -> Losses:
    """The losses that a script's ranks have printed."""
    assert result.code == 0, result.output
    lines: List[Dict[str, float]] = [
        json.loads(found) for found in re.findall(r"\{.*?\}", result.output)
    ]
    return {(int(one["rank"]), int(one["step"])): one["loss"] for one in lines if "loss" in one}


@pytest.mark.parametrize(
    "name",
    [
        "language",
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in (
                "actor",
                "adapters",
                "averaged",
                "boxes",
                "compiled",
                "distilled",
                "experts",
                "faces",
                "images",
                "maps",
                "normed",
                "pairs",
                "penalised",
                "quantised",
                "recomputed",
                "scaled",
                "sharp",
                "speech",
                "vision",
                "words",
            )
        ),
    ],
)
def test_a_script_s_losses_are_those_of_torch_s_own(name: str) -> None:
    script = AS_IT_IS / f"{name}.py"
    expected, found = losses(script), losses(script, "-m", "p3kv.ddp")
    assert len(expected) >= 2 * 50
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    "meeting",
    [
        "tcp://127.0.0.1:{}",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("file://{}", "{}")),
    ],
)
def test_a_script_that_starts_its_ranks_itself_trains_as_with_torch_s_own(
    meeting: str, tmp_path: Path
) -> None:
    script = str(AS_IT_IS / "spawned.py")
    with held_port() as holder:
        where = tmp_path / "meeting" if "file" in meeting else holder.getsockname()[1]
        command = [script, meeting.format(where)]
        expected, found = (
            said(run_with_gloo([str(PYTHON), *how, *command], environment(P3KV_SECRET=""), JOB_S))
            for how in ((), ("-m", "p3kv.ddp"))
        )
    assert len(expected) == 2 * 50
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.long  # test_children.py starts ranks from ranks
def test_a_script_that_starts_its_own_command_again_trains_as_with_torch_s_own() -> None:
    with held_port() as holder:
        command = [str(SCRIPTS / "torch_again.py"), str(holder.getsockname()[1])]
        results = [
            run_with_gloo([str(PYTHON), *how, *command], environment(P3KV_VERBOSE="1"), JOB_S)
            for how in ((), ("-m", "p3kv.ddp"))
        ]
    expected, found = map(said, results)
    assert len(expected) == 2 * 20
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert results[1].output.count("trained by p3kv: SGD, servers update") == 2


def test_a_script_s_scaler_is_as_with_torch_s_own() -> None:
    """Losses and scales, with clipping and without, also where gradients of one rank overflow."""
    script = SCRIPTS / "torch_wrapped_scaler.py"
    expected, found = losses(script), losses(script, "-m", "p3kv.ddp")
    assert len(expected) == 2 * 3 * 80
    assert len({loss for (_, step), loss in expected.items() if step % 1000 >= 40}) > 20, "scales"
    for (rank, step), loss in expected.items():
        rounds = step >= 2000  # to float16
        near = pytest.approx(loss, rel=0 if rounds else 1e-6, abs=1e-5 if rounds else 0)
        assert found[rank, step] == near, (rank, step)


def test_passes_that_add_up_from_a_later_step_on_have_workers_update_held_steps() -> None:
    """As after a warm-up, by clipping and by a scaler; also where a batch is left out after its
    backward pass."""
    script = SCRIPTS / "torch_warmed.py"
    expected, found = losses(script), losses(script, "-m", "p3kv.ddp")
    assert len(expected) == 2 * 4 * 60
    assert found == pytest.approx(expected, rel=1e-5)


def test_what_a_script_does_first_in_a_later_step_is_as_with_torch_s_own() -> None:
    """Servers have updated by then, and workers go on from the states before: gradients, weights or
    rates that the script changes, steps that it leaves out, a second loss, states that it reads."""
    script = SCRIPTS / "torch_late_changes.py"
    expected, found = losses(script), losses(script, "-m", "p3kv.ddp", P3KV_SLICE_SIZE=3000)
    assert len(expected) == 744
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.long  # loops that are drawn nearly show it
def test_what_a_script_without_a_wrapper_does_first_in_a_later_step_is_as_with_torch_s_own() -> (
    None
):
    script = SCRIPTS / "torch_late_changes.py"
    expected, found = losses(script), losses(script, args=["plain"], P3KV_SLICE_SIZE=3000)
    assert len(found) == 704
    assert found == pytest.approx({at: expected[at] for at in found}, rel=1e-5)


@pytest.mark.parametrize(
    "seeds",
    [
        [11, 177, 268, 342, 493, 705, *range(20, 32)],  # the first ones were wrong before
        *(pytest.param(range(at, at + 100), marks=pytest.mark.long) for at in range(0, 800, 100)),
    ],
    ids=lambda seeds: f"{len(seeds)}",
)
def test_loops_that_are_drawn_train_as_with_torch_s_own(seeds: Sequence[int]) -> None:
    """With a wrapper and without: gradients that are read, changed and left, on one rank or on all,
    weights and states that are written, passes and steps in any number."""
    script, its = SCRIPTS / "torch_drawn.py", [str(seed) for seed in seeds]
    expected = losses(script, args=["wrapped", *its])
    assert len(expected) > 20 * len(seeds)
    for modules, how in ((["-m", "p3kv.ddp"], "wrapped"), ([], "plain")):
        found = losses(script, *modules, args=[how, *its], P3KV_SLICE_SIZE=400)
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_wrappers_optimizers_and_methods_of_public_scripts_train_as_with_torch_s_own() -> None:
    """Their subclasses, one optimizer around another, several of the same parameters, parameters of
    each rank's own, steps that were bound before p3kv is attached or are made before a pass, and
    scaled steps that are left out."""
    script = SCRIPTS / "torch_public_habits.py"
    expected, found = losses(script), losses(script, "-m", "p3kv.ddp")
    assert len(expected) == 3820
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.long  # habits have buffers come late
def test_a_late_buffer_is_refused_by_name_where_ranks_differ_or_checkpoints_would_lack_it(
    tmp_path: Path,
) -> None:
    command = [
        str(PYTHON), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "p3kv.ddp", str(SCRIPTS / "torch_public_habits.py"), "buffers_differ",
    ]  # fmt: skip
    result = run_with_gloo(command, environment(P3KV_SECRET=""), JOB_S)
    assert result.code and "'bank' is torch.float32 of shape (3,) on rank 0, and" in result.output
    saved = environment(P3KV_SECRET="", P3KV_CHECKPOINT_DIR=tmp_path, P3KV_CHECKPOINT_EVERY=5)
    result = run_with_gloo(command, saved, JOB_S)
    assert result.code and "'bank' is new" in result.output


def test_a_rank_may_go_on_alone_for_longer_than_a_worker_may_keep_others_waiting() -> None:
    """Nobody waits for the last round of buffers."""
    result = launched("torch_goes_on_alone.py", "8", P3KV_STALL_TIMEOUT_S="3")
    assert result.code == 0 and "evaluated" in result.output, result.output
    assert "has not pushed" not in result.output, result.output


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_rank_that_ends_leaves_no_other_in_a_collective_of_the_script(rank: int) -> None:
    """Its process waits for the servers, and its connections would stay open."""
    command = [
        str(PYTHON), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "p3kv.ddp", str(SCRIPTS / "torch_ends_early.py"), str(rank),
    ]  # fmt: skip
    result = run_with_gloo(command, environment(P3KV_SECRET=""), JOB_S)
    assert result.code == 1, result.output
    assert f"worker {1 - rank} has made step 1" in result.output, result.output
    assert "Connection closed by peer" in result.output, result.output
    assert f"worker {rank} had ended in order before" in result.output, result.output


def test_a_module_is_run_as_python_runs_it(tmp_path: Path) -> None:
    """With imports from its package; of a package its `__main__`."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "other.py").write_text("VALUE = 7\n")
    (package / "__main__.py").write_text("from .train import *\n")
    (package / "train.py").write_text(
        "import sys\nfrom .other import VALUE\n"
        "from torch.nn.parallel import DistributedDataParallel as wrapper\n"
        "print(VALUE, __package__, sys.argv[1:], hasattr(wrapper, 'be_torch_s'))\n"
    )
    for module in ("package", "package.train"):
        command = f'cd {tmp_path} && "$@"', "cd", str(PYTHON), "-m", "p3kv.ddp", "-m", module, "a"
        result = run(["bash", "-c", *command], environment(), JOB_S)
        assert "7 package ['a'] True" in result.output, result.output
    result = run([*command[2:6], "package.lacks"], environment(), JOB_S)
    assert result.code == 2 and "there is no module 'package.lacks'" in result.output


def test_buffers_are_each_rank_s_own_between_a_step_and_the_next_pass() -> None:
    script = SCRIPTS / "torch_statistics.py"
    expected, found = losses(script), losses(script, "-m", "p3kv.ddp")
    assert len(expected) == 2 * 2 * (24 + 4 + 12 + 4)
    assert found == pytest.approx(expected, rel=1e-5)


def test_models_in_torch_s_wrapper_train_as_in_one_process() -> None:
    """Optimizers from before and after, several of one model; gradients that add up, by `no_sync`
    and without; losses that reach other models; clipping, buffers, and what is refused."""
    command = [
        str(PYTHON), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(SCRIPTS / "torch_parallel.py"),
    ]  # fmt: skip
    result = run_with_gloo(command, environment(P3KV_SECRET=""), JOB_S)
    assert result.code == 0, result.output
    assert result.output.count("right: gradients_are_used_from_a_later_step_on") == 2


@pytest.mark.parametrize(
    "hows",
    [
        ["plainly", "first unused"],
        pytest.param(["clips", "adds first", "first parts"], marks=pytest.mark.long),
    ],
    ids="; ".join,
)
def test_gradients_that_a_script_logs_late_are_those_of_torch_s_own(hows: List[str]) -> None:
    """Norms and histograms before step and after it, of servers' means; also by one rank alone,
    while the others wait for it before they step, and in steps without some gradients."""
    script = SCRIPTS / "torch_logged.py"
    expected, found = losses(script, args=hows), losses(script, "-m", "p3kv.ddp", args=hows)
    for number, how in enumerate(hows):
        its = {at: loss for at, loss in expected.items() if at[1] // 10_000 == number}
        assert len(its) > 2 * 60 + 10 * 6
        near = pytest.approx(its, rel=1e-5, abs=1e-6)
        assert {at: loss for at, loss in found.items() if at in its} == near, how


@pytest.mark.long  # those without a checkpoint nearly show it
def test_gradients_that_a_script_logs_late_are_means_where_a_checkpoint_may_follow(
    tmp_path: Path,
) -> None:
    """Of a second optimizer, too."""
    script, how = SCRIPTS / "torch_logged.py", ["first two"]
    saves = {"P3KV_CHECKPOINT_DIR": tmp_path, "P3KV_CHECKPOINT_EVERY": 2}
    expected, found = losses(script, args=how), losses(script, "-m", "p3kv.ddp", args=how, **saves)
    assert len(expected) > 2 * 60 + 10 * 6
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("servers", "settings"),
    [
        (2, {"P3KV_LOCAL_AGGREGATION": "0", "P3KV_SLICE_SIZE": "5000"}),
        *(
            pytest.param(servers, settings, marks=pytest.mark.long)
            for servers, settings in ((1, {}), (2, {"P3KV_DETERMINISTIC": "1"}))
        ),
    ],
)
def test_gradients_that_are_read_late_are_the_servers_means(
    servers: int, settings: Dict[str, str]
) -> None:
    """Bit for bit, in all ways to use them; what servers have no mean of is refused, and changes
    are."""
    result = launched("torch_read_late.py", servers=servers, **settings)
    assert result.code == 0, result.output
    assert result.output.count("right: ") == 2 * 13, result.output


@pytest.mark.parametrize(
    ("settings", "checks"),
    [
        (
            {"P3KV_GRADIENT_CODEC": "topk:share=0.1"},
            ["what_has_no_mean_is_refused", "a_clipped_one_that_stays_is_refused"],
        ),
        pytest.param(
            {"P3KV_CONSISTENCY": "delayed:staleness=1"},
            ["what_has_no_mean_is_refused"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_gradients_that_have_no_mean_are_refused_late(
    settings: Dict[str, str], checks: List[str]
) -> None:
    """Also one that is clipped, where a pass adds to it."""
    result = launched("torch_read_late.py", *checks, **settings)
    assert result.code == 0, result.output
    assert result.output.count("right: ") == 2 * len(checks), result.output


@pytest.mark.parametrize(
    ("check", "settings"),
    [
        ("a_hook_rounds_gradients", {}),
        ("passes_add_up_as_the_script_says", {"P3KV_UPDATES": "workers"}),
        pytest.param("optimizers_are_found", {}, marks=pytest.mark.long),
        pytest.param(
            "workers_update_by_the_setting", {"P3KV_UPDATES": "workers"}, marks=pytest.mark.long
        ),
    ],
)
def test_p3kv_run_trains_what_a_script_wraps(check: str, settings: Dict[str, str]) -> None:
    result = launched("torch_parallel.py", check, **settings)
    assert result.code == 0, result.output
    assert result.output.count(f"right: {check}") == 2, result.output
