"""Encrypted connections on which somebody always changes bits: the job waits as long as it may, and
ends in a few words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults import Proxy, goes_on
from tests.jobs import JobResult, TrainingJob
from tests.served import Serving, welcome

HANDSHAKE_BYTES = 4000
"""More than a worker says in a handshake, less than a frame of the measurement."""
SILENCE_TIMEOUT_S = 6.0
SETTINGS = {"P3KV_ENCRYPT": 1, "P3KV_SILENCE_TIMEOUT_S": SILENCE_TIMEOUT_S}
PEERS = 2 * 2 * 1
"""Each of two workers is one for the server, which is one for each of them."""


def assert_told_in_few_words(result: JobResult) -> None:
    assert result.code == 1, result.output
    assert "what came is not what was sent" in result.output, result.output
    assert "new connections have carried nothing" in result.output, result.output
    warned = re.findall("has (?:a new|no) connection to this process", result.output)
    assert 1 <= len(warned) <= 2 * PEERS, result.output


def test_whoever_changes_bits_while_the_network_is_measured_ends_the_job(tmp_path: Path) -> None:
    with Proxy() as proxy:
        proxy.flips_after_bytes = HANDSHAKE_BYTES
        with TrainingJob(tmp_path, **SETTINGS, **proxy.settings) as job:
            result = job.result(timeout_s=60.0)
    assert_told_in_few_words(result)


def test_whoever_changes_bits_in_mid_training_ends_the_job_after_the_silence_timeout(
    tmp_path: Path,
) -> None:
    with Proxy() as proxy, TrainingJob(
        tmp_path, 2, 1, [0.01], script="enduring.py", **SETTINGS, **proxy.settings
    ) as job:
        job.wait_until_training()
        goes_on(tmp_path)
        proxy.flips_after_bytes = HANDSHAKE_BYTES
        result = job.result(timeout_s=4 * SILENCE_TIMEOUT_S)
    assert_told_in_few_words(result)


@pytest.mark.long
def test_a_server_that_sends_nothing_back_is_named_by_who_measures_the_network() -> None:
    serving = Serving(1, P3KV_SLICE_SIZE="", P3KV_SILENCE_TIMEOUT_S=1)
    try:
        (link,) = serving.links()
        link.sendall(welcome(0))
        failure = serving.hear().failure
        link.close()
    finally:
        serving.close()
    assert (failure.role, failure.rank) == ("server", 0)
    assert "it has not sent back within 11 s" in failure.reason
