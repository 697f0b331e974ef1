"""Ranks agree over a launcher's store, also where it has what earlier starts have left; pure."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Dict, Iterator, List

import pytest

from p3kv.config.ranks import LauncherStore, launcher_store
from p3kv.errors import ConfigError, RendezvousError
from p3kv.processes import meeting
from tests.jobs import DEADLINE_S

TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.3",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SECRET = {"P3KV_SECRET": "0123456789abcdef"}


class Store:
    """A store of keys in memory, that waits for at most so long."""

    def __init__(self, timeout_s: float = DEADLINE_S) -> None:
        self.values: Dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._timeout_s = timeout_s

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self.values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.values[key]

    def wait(self, keys: List[str]) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), self._timeout_s):
                raise RuntimeError("wait timeout")

    def check(self, keys: List[str]) -> bool:
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        assert expected == ""
        with self._changed:
            if key not in self.values:
                self.set(key, value)
            return self.values[key]


def place(rank: int, size: int = 3) -> LauncherStore:
    return LauncherStore("torchrun", "127.0.0.1", 29500, rank, size)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("P3KV_SECRET", "P3KV_SECRET_FILE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"):
        monkeypatch.delenv(name, raising=False)


def agreed(*decisions: Future[Dict[str, str]]) -> Dict[str, str]:
    """What all have agreed on."""
    found = [one.result(DEADLINE_S) for one in decisions]
    for name in ("token", "host", "port", "secret"):
        assert len({one[name] for one in found}) == 1
    return found[0]


def test_all_ranks_have_the_same_and_each_start_another(threads: ThreadPoolExecutor) -> None:
    store, starts = Store(), []
    for _ in range(3):
        # Other ranks come before rank 0, and find what the last start has left.
        others = [threads.submit(meeting.follow, store, place(rank)) for rank in (1, 2)]
        starts.append(agreed(*others, threads.submit(meeting.lead, store, place(0))))
    for name in ("token", "secret"):
        assert len({one[name] for one in starts}) == 3
    assert {one["host"] for one in starts} == {"127.0.0.1"}
    assert all(len(one["secret"]) == 64 for one in starts)


def test_a_start_goes_on_after_one_that_ended_before_it_was_decided(
    threads: ThreadPoolExecutor,
) -> None:
    store = Store(0.2)
    with pytest.raises(RendezvousError, match=r"for rank 1, 2: see their output"):
        meeting.lead(store, place(0))
    store = Store()
    store.values["p3kv/token"] = b"undecided"
    others = [threads.submit(meeting.follow, store, place(rank)) for rank in (1, 2)]
    store.wait([f"p3kv/undecided/{rank}" for rank in (1, 2)])  # they take it for this start's
    decision = agreed(*others, threads.submit(meeting.lead, store, place(0)))
    assert decision["token"] != "undecided"


def test_what_the_user_has_set_stays_and_a_secret_does_not_travel(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**SECRET, "DMLC_PS_ROOT_PORT": "9009"}.items():
        monkeypatch.setenv(name, value)
    store = Store()
    other = threads.submit(meeting.follow, store, place(1, 2))
    decision = agreed(other, threads.submit(meeting.lead, store, place(0, 2)))
    assert (decision["port"], decision["secret"]) == ("9009", "")
    assert not any(SECRET["P3KV_SECRET"].encode() in value for value in store.values.values())


def test_ranks_meet_only_where_address_or_secret_is_missing() -> None:
    where = launcher_store(TORCHRUN)
    assert where == LauncherStore("torchrun", "10.0.0.3", 29500, 1, 4)
    assert launcher_store({**TORCHRUN, **SECRET}) == where
    root = {"DMLC_PS_ROOT_URI": "10.0.0.9"}
    assert launcher_store({**TORCHRUN, **root}) == where
    for other in (
        {**TORCHRUN, **SECRET, **root},
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "4"},
        {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"},
        {**TORCHRUN, "DMLC_ROLE": "worker"},
        {**TORCHRUN, "MASTER_PORT": "x"},
    ):
        assert launcher_store(other) is None
    with pytest.raises(ConfigError, match="P3KV_SECRET has 5 letters"):
        launcher_store({**TORCHRUN, **root, "P3KV_SECRET": "short"})
