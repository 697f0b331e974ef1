"""p3kv.torch in real jobs, beside the same training in one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest

from tests.jobs import JOB_S, SCRIPTS, JobResult, environment, run
from tests.torch_environment import NEEDS_TORCH, PYTHON

pytestmark = NEEDS_TORCH


def job(
    script: str, *arguments: object, workers: int = 2, servers: int = 2, **env: Any
) -> JobResult:
    command: List[str] = [
        str(PYTHON), "-m", "p3kv", "launch", "-n", str(workers), "-s", str(servers), "--",
        str(PYTHON), str(SCRIPTS / script), *map(str, arguments),
    ]  # fmt: skip
    return run(command, environment(**env), JOB_S)


def weights(first: Path, second: Path) -> JobResult:
    """Compares two files of weights, bit for bit."""
    program = (
        "import sys, torch\n"
        "one, other = map(torch.load, sys.argv[1:])\n"
        "assert one.keys() == other.keys() and len(one) > 5\n"
        "assert all(torch.equal(one[name], other[name]) for name in one)\n"
    )
    return run([str(PYTHON), "-c", program, str(first), str(second)], environment(), JOB_S)


@pytest.mark.long  # SGD is trained so beside clipping, and torch_slices.py updates by all classes
@pytest.mark.parametrize(
    ("name", "workers", "servers"),
    [("Adafactor", 2, 3), ("AdamW", 2, 3), ("Adagrad", 4, 1), ("RMSprop", 1, 1)],
)
def test_weights_and_states_are_those_of_one_process(
    tmp_path: Path, name: str, workers: int, servers: int
) -> None:
    """With tied weights, attention, an LSTM, groups, a schedule, gradients that add up, and a layer
    that some workers do not use."""
    result = job(
        "torch_exact.py", name, tmp_path / "w.pt", workers=workers, servers=servers,
        P3KV_SLICE_SIZE=300,
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count(f"right with {name}") == workers, result.output


@pytest.mark.long  # that of two optimizers, in test_torch_rows.py, nearly shows it
@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_a_job_that_is_killed_goes_on_bit_for_bit_with_other_servers_and_slices(
    tmp_path: Path, name: str
) -> None:
    undisturbed, goes_on = tmp_path / "undisturbed.pt", tmp_path / "goes on.pt"
    assert job("torch_exact.py", name, undisturbed, P3KV_SLICE_SIZE=300).code == 0
    settings = {"P3KV_CHECKPOINT_DIR": tmp_path / "checkpoints", "P3KV_CHECKPOINT_EVERY": 5}
    killed = job("torch_exact.py", name, goes_on, 13, P3KV_SLICE_SIZE=300, **settings)
    assert killed.code != 0 and "killed by SIGKILL" in killed.output
    result = job(
        "torch_exact.py", name, goes_on, 13, servers=3, P3KV_SLICE_SIZE=500, P3KV_RESUME=1,
        **settings,
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count("begins after 10 steps") == 2, result.output
    compared = weights(undisturbed, goes_on)
    assert compared.code == 0, compared.output


@pytest.mark.long  # test_torch_scripts.py resumes one, without rounding
def test_a_layer_that_is_frozen_at_the_checkpoint_goes_on_bit_for_bit_though_values_are_rounded(
    tmp_path: Path,
) -> None:
    paths = tmp_path / "undisturbed", tmp_path / "goes on"
    for path, ends in zip((*paths, paths[1]), (9, 6, 9)):
        result = job(
            "torch_frozen_resumed.py", path, ends, P3KV_VALUE_CODEC="float16",
            P3KV_CHECKPOINT_DIR=f"{path} checkpoints", P3KV_CHECKPOINT_EVERY=5,
            P3KV_RESUME=int(path == paths[1] and ends == 9),
        )  # fmt: skip
        assert result.code == 0, result.output
    compared = weights(*(path.with_name(f"{path.name}1") for path in paths))
    assert compared.code == 0, compared.output


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("autocast", "SGD"),
        pytest.param("float16", "AdamW", marks=pytest.mark.long),
    ],
)
def test_half_precision_has_the_numbers_of_one_process_with_single_precision_copies(
    dtype: str, name: str
) -> None:
    result = job(
        "torch_half.py", dtype, name, workers=3, servers=2, P3KV_SLICE_SIZE=300,
        P3KV_DETERMINISTIC=1,
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count(f"right in {dtype}") == 3, result.output


@pytest.mark.long
def test_a_killed_job_in_bfloat16_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """The numbers are those of one process before the end and after it."""
    settings: Dict[str, Any] = {
        "P3KV_CHECKPOINT_DIR": tmp_path, "P3KV_CHECKPOINT_EVERY": 4, "P3KV_DETERMINISTIC": 1
    }  # fmt: skip
    killed = job("torch_half.py", "bfloat16", "AdamW", 10, P3KV_SLICE_SIZE=300, **settings)
    assert killed.code != 0 and "killed by SIGKILL" in killed.output, killed.output
    result = job(
        "torch_half.py", "bfloat16", "AdamW", 10, servers=3, P3KV_SLICE_SIZE=200, P3KV_RESUME=1,
        **settings,
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count("begins after 8 steps") == 2, result.output
    assert result.output.count("right in bfloat16") == 2, result.output


def test_servers_update_slices_rows_and_whole_tensors_bit_for_bit_as_torch_does() -> None:
    """By every class that they run, with a schedule: as its `step()` on the whole weight."""
    result = run([str(PYTHON), str(SCRIPTS / "torch_slices.py")], environment(), 120)
    assert result.code == 0, result.output
    assert "right: ASGD, Adadelta, " in result.output, result.output


def test_momentum_that_a_codec_applies_is_applied_once() -> None:
    """`dgc` that sends all elements has the numbers of SGD with momentum and weight decay."""
    result = job("torch_dgc.py", P3KV_SLICE_SIZE=300, P3KV_GRADIENT_CODEC="dgc:share=1.0")
    assert result.code == 0, result.output
    assert result.output.count("right with dgc") == 2, result.output


@pytest.mark.long  # tests/processes/test_torchrun.py starts two hosts' jobs
@pytest.mark.parametrize("hosts_sum", [False, True])
def test_small_parameters_travel_together_with_the_numbers_of_each(hosts_sum: bool) -> None:
    """Also those that some workers, or none, have used in a step, and those that are frozen."""
    workers = 3 if hosts_sum else 2
    on_hosts = ["on_hosts.py", 2, "torch_buckets.py"] if hosts_sum else ["torch_buckets.py"]
    where = {"DMLC_NODE_HOST": "127.0.0.9"} if hosts_sum else {}
    result = job(*on_hosts, workers=workers, **where)
    assert result.code == 0, result.output
    assert result.output.count("right in buckets") == workers, result.output


def test_torchrun_starts_a_job(tmp_path: Path) -> None:
    command = [
        str(PYTHON.parent / "torchrun"), "--standalone", "--nproc_per_node", "2",
        str(SCRIPTS / "torch_exact.py"), "SGD", str(tmp_path / "w.pt"),
    ]  # fmt: skip
    result = run(command, environment(P3KV_SECRET=""), 240)
    assert result.code == 0, result.output
    assert result.output.count("right with SGD") == 2, result.output


def test_whoever_reads_a_weight_waits_for_it_and_whoever_changes_a_gradient_is_noticed() -> None:
    """A gradient that has left is changed by nobody unnoticed, through `data`, NumPy or an address
    either; reading it changes nothing."""
    result = job("in_turn.py", "torch_late.py", ",", "torch_gradients.py")
    assert result.code == 0, result.output
    assert result.output.count("all reads wait") == 2, result.output
    assert result.output.count("values are written early") == 2, result.output
    assert result.output.count("no gradient changes unnoticed") == 2, result.output


def test_wrong_uses_are_refused_with_what_to_do() -> None:
    result = job("torch_late.py", "wrong", workers=1, servers=1)
    assert result.code == 0, result.output
    assert "wrong uses are named" in result.output
    assert result.output.count("parameters that the model has no more: weight. What") == 1


def test_what_users_of_ddp_do_wrong_at_first_is_named_also_in_a_process_alone() -> None:
    result = run([str(PYTHON), str(SCRIPTS / "torch_mistakes.py")], environment(), JOB_S)
    assert result.code == 0 and "all mistakes are named" in result.output, result.output


def test_workers_that_step_other_optimizers_and_make_none_of_p3kv_s_are_told_early() -> None:
    result = job("torch_mistakes.py", "forgot", servers=1)
    assert result.code == 0, result.output
    early, late = (
        "this worker has made 3 steps of AdamW, and p3kv knows",
        "this worker trains alone",
    )
    for rank in range(2):
        said = result.said_by(f"worker {rank}")
        assert said.count(early) == said.count(late) == 1, said
    shown = re.search(
        rf"^(worker \d) .*{early}", result.output, re.MULTILINE
    )  # the other's are told
    assert shown is not None, result.output
    before, _, after = result.said_by(shown[1]).partition("has trained")
    assert early in before and late in after, result.output


def test_threads_that_meet_lose_no_value_no_push_and_no_norm() -> None:
    result = job("torch_races.py", workers=1, servers=1)
    assert result.code == 0 and "threads meet and nothing is lost" in result.output, result.output


def test_steps_are_clipped_by_the_norm_of_the_mean_gradient(tmp_path: Path) -> None:
    """Where some layers are used in some steps only, gradients add up, some steps are not clipped,
    and norms are read at once or long after. And SGD without clipping, on as many workers."""
    result = job(
        "in_turn.py", "torch_clipped.py", ",", "torch_exact.py", "SGD", tmp_path / "w.pt",
        workers=3, P3KV_SLICE_SIZE=300,
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count("clipped as one process") == 3, result.output
    assert result.output.count("right with SGD") == 3, result.output


def test_a_step_that_any_worker_finds_bad_changes_nothing_on_all() -> None:
    """Also with nan, gradients that lack, an exception in `backward`, and beside clipping: weights,
    states and counts of steps are those of one process that leaves such steps out, whoever updates.
    So it is with a scaler of losses. And Muon's steps are those of one process."""
    skipped = "torch_skipped.py", "AdamW", 0.02
    result = job(
        "in_turn.py", *skipped, "servers", ",", *skipped, "workers", ",", "torch_scaled.py", 0.02,
        ",", "torch_muon.py", P3KV_SLICE_SIZE=300,
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count("skipped as one process") == 2 * 2, result.output
    assert result.output.count("scaled as one process") == 2, result.output
    assert result.output.count("right with Muon") == 2, result.output


@pytest.mark.long
@pytest.mark.parametrize("name", ["Adagrad", "Adafactor"])
def test_a_step_that_any_worker_finds_bad_changes_no_state_of(name: str) -> None:
    result = job("torch_skipped.py", name, "inf", "servers", P3KV_SLICE_SIZE=300)
    assert result.code == 0, result.output
    assert result.output.count("skipped as one process") == 2, result.output


@pytest.mark.long
def test_a_scaler_of_losses_is_as_in_one_process() -> None:
    """Bit for bit where steps are not clipped; gradients leave during `backward`."""
    result = job("torch_scaled.py", "inf", P3KV_SLICE_SIZE=300)
    assert result.code == 0, result.output
    assert result.output.count("scaled as one process") == 2, result.output


def test_no_step_is_dropped_of_which_a_codec_keeps_a_part() -> None:
    result = job(
        "torch_skipped.py", "SGD", "inf", "servers", workers=1, servers=1,
        P3KV_GRADIENT_CODEC="topk",
    )  # fmt: skip
    assert result.code != 0
    assert "opt.skip_step(): the codec of gradients would send" in result.output, result.output
    assert "Use another codec (float16)" in result.output, result.output


@pytest.mark.parametrize("batches", [(7, 3, 5), pytest.param((2, 5, 4), marks=pytest.mark.long)])
def test_the_mean_is_that_of_the_workers_that_have_not_left(batches: Tuple[int, ...]) -> None:
    result = job(
        "torch_leaves.py", *batches, workers=3, P3KV_SLICE_SIZE=30, P3KV_LET_WORKERS_LEAVE=1
    )
    assert result.code == 0, result.output
    for rank, number in enumerate(batches):
        assert f"worker {rank} was right for {number} steps" in result.output, result.output


def test_a_rule_by_which_it_would_do_something_else_is_refused() -> None:
    setting = {"P3KV_CONSISTENCY": "every_fourth", "P3KV_PLUGINS": "own_fourth"}
    result = job("torch_late.py", "wrong", workers=1, servers=1, **setting)
    assert result.code != 0
    assert "the consistency 'every_fourth' does not: use another rule" in result.output


def test_each_rule_can_do_what_the_table_of_combinations_says() -> None:
    """Clipping, states and sparse rows; by `local` and `lazy`, clipping is the worker's own."""
    result = job("torch_combinations.py", servers=1)
    assert result.code == 0, result.output
    assert result.output.count("all is as the table says") == 2, result.output


def test_a_server_s_optimizers_do_without_torch_s_compiler() -> None:
    program = (
        "import sys\n"
        "from p3kv.frontends.torch.front_end import MakeTorchOptimizer\n"
        "MakeTorchOptimizer()()\n"
        "import torch\n"
        "for kind in torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Muon:\n"
        "    weight = torch.nn.Parameter(torch.ones(2, 2))\n"
        "    weight.grad = torch.ones(2, 2)\n"
        "    kind([weight], lr=0.1).step()\n"
        "    assert weight.sum() < 4\n"
        "assert 'torch._dynamo.eval_frame' not in sys.modules\n"
        "double = torch.compile(lambda x: 2 * x, backend='eager')\n"
        "assert double(weight).equal(2 * weight)\n"
        "assert 'torch._dynamo.eval_frame' in sys.modules\n"
    )
    result = run([str(PYTHON), "-c", program], environment(), JOB_S)
    assert result.code == 0, result.output


def test_a_process_alone_trains_with_the_inner_optimizer() -> None:
    program = (
        "import copy, p3kv.torch, torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "inner = torch.optim.SGD(model.parameters(), lr=1.0)\n"
        "optimizer = p3kv.torch.Optimizer(model, inner)\n"
        "before = model.weight.detach().clone()\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "optimizer.step()\n"
        "optimizer.wait()\n"
        "torch.testing.assert_close(model.weight.detach(), before - 1)\n"
        "scaler = torch.amp.GradScaler('cpu')\n"
        "optimizer.zero_grad()\n"
        "scaler.scale(model(torch.ones(1, 2)).sum()).backward()\n"
        "scaler.step(optimizer)\n"
        "torch.testing.assert_close(model.weight.detach(), before - 2)\n"
        "called = []\n"
        "copied = copy.deepcopy({'model': model, 'optimizer': optimizer})\n"
        "optimizer.register_step_pre_hook(lambda *_: called.append('hook'))\n"
        "assert optimizer is inner and isinstance(optimizer, torch.optim.SGD)\n"
        "for one in ({'model': model, 'optimizer': optimizer}, copied):\n"
        "    before = one['model'].weight.detach().clone()\n"
        "    one['optimizer'].add_param_group({'params': [torch.nn.Parameter(torch.ones(1))]})\n"
        "    one['optimizer'].zero_grad()\n"
        "    one['model'](torch.ones(1, 2)).sum().backward()\n"
        "    one['optimizer'].step()\n"
        "    torch.testing.assert_close(one['model'].weight.detach(), before - 1)\n"
        "assert called == ['hook']\n"
        "fused = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)\n"
        "fused = p3kv.torch.Optimizer(model, fused)\n"
        "before = model.weight.detach().clone()\n"
        "fused.zero_grad()\n"
        "scaler.scale(model(torch.ones(1, 2)).sum()).backward()\n"
        "scaler.step(fused)\n"
        "assert fused.state[model.weight]['exp_avg'].max() < 1\n"
        "assert optimizer.stats()['steps'] == 0 and optimizer.stats()['why'] is None\n"
        "print('alone is right')\n"
    )
    result = run([str(PYTHON), "-c", program], environment(), JOB_S)
    assert result.code == 0 and "alone is right" in result.output, result.output
    assert "trains in this process alone" in result.output


@pytest.mark.parametrize(
    ("name", "staleness", "predict"),
    [
        ("SGD", 2, "true"),
        pytest.param("AdamW", 2, "damped", marks=pytest.mark.long),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in [("SGD", 1, ""), ("Nesterov", 3, "damped")]
        ),
    ],
)
def test_a_worker_goes_on_with_the_weights_that_a_delayed_rule_names(
    name: str, staleness: int, predict: str
) -> None:
    """Also where servers predict them, with a frozen weight that the script writes to, and with
    BatchNorm, whose buffers are each worker's own then."""
    rule = f"delayed:staleness={staleness}" + (f",predict={predict}" if predict else "")
    arguments = [name, staleness, *([predict] if predict else [])]
    result = job(
        "torch_stale.py", *arguments, workers=2, servers=2, P3KV_SLICE_SIZE=20,
        P3KV_CONSISTENCY=rule,
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count("every weight is the one that the rule names") == 2, result.output


def test_a_worker_leads_by_as_many_rounds_as_a_bounded_rule_says() -> None:
    result = job(
        "torch_clocks.py", 2, workers=3, servers=2, P3KV_SLICE_SIZE=15,
        P3KV_CONSISTENCY="bounded:staleness=2",
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count("led by ") == 3 and "led by 2" in result.output, result.output


def test_what_nobody_has_any_more_is_forgotten_everywhere_and_trained_again_after_a_resume(
    tmp_path: Path,
) -> None:
    """A fold has 16 MB of weights and as much of momentum. Its optimizer is garbage, so checkpoints
    have nothing of it. Of one that another has replaced they have how many steps it made."""
    settings = {"P3KV_CHECKPOINT_DIR": tmp_path / "c", "P3KV_CHECKPOINT_EVERY": 1}
    first = job("torch_folds.py", servers=1, **settings)
    assert first.code == 0, first.output
    for rank in range(2):
        said = first.said_by(f"worker {rank}")
        used = [tuple(map(int, one)) for one in re.findall(r"used (\d+) (\d+) (\d+)", said)]
        assert len(used) == 9, first.output
        # What is under way when a fold ends is freed with the next one, and the first folds fill
        # what the allocator keeps. Three that stay are 144 MB here, and 96 MB on the server.
        for at, most in ((0, 110), (1, 60)):
            assert min(one[at] for one in used[6:]) - min(one[at] for one in used[3:6]) < most, used
        assert used[-1][2] == used[0][2], used
    sizes = [one.stat().st_size for one in sorted((tmp_path / "c").iterdir())]
    assert max(sizes) < 33e6 and sizes[-1] < 1e6, sizes
    again = job("torch_folds.py", servers=1, P3KV_RESUME=1, **settings)
    assert again.code == 0, again.output
    for rank in range(2):
        one, other = (result.said_by(f"worker {rank}") for result in (first, again))
        ends = re.findall(r"(fold \d|second) from \d ends with (\S+)", one)
        assert len(ends) == 10
        assert re.findall(r"(fold \d|second) from \d ends with (\S+)", other) == ends
        assert re.search("first from 3 .*second from 3", other, re.DOTALL), again.output
