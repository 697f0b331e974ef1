"""What holds for all tests, and the networks that several of them use."""

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Iterator, List

import pytest
from hypothesis import HealthCheck, settings

from experiments.cluster import Cluster
from tests import sshd, without_mxnet
from tests.names import give_names

without_mxnet.skip_what_needs_it()

# How long an example takes says more of the machine's other work than of the code.
settings.register_profile("p3kv", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("p3kv")

# Tests press Ctrl-C in processes of theirs, and close their terminal. A shell that runs
# `scripts/test &` in a script has the one ignored, `nohup` the other, and processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Containers often have Python keep no compiled modules. Then each of the thousands of processes
# compiles p3kv again, which takes as long as all else in its import.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist's own order: most tests first


def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    """Files of torch's jobs come first: they take longest, and one process runs a file to its
    end."""
    items.sort(key=lambda item: "torch" not in item.path.name)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two hosts that know each other as n0 and n1, and as pods of a job."""
    with Cluster(2) as made:
        give_names(made, ["n0 train-0.train", "n1 train-1.train"])
        yield made


@pytest.fixture(scope="module")
def ssh_path(cluster: Cluster) -> Iterator[str]:
    """A PATH whose ssh reaches both hosts."""
    with tempfile.TemporaryDirectory() as folder, sshd.ssh_between(cluster, Path(folder)) as path:
        yield path
