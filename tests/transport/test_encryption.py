"""P3KV_ENCRYPT=1: what workers and servers say is for nobody else, and nobody stands between."""

from __future__ import annotations

import gc
import hashlib
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Dict, List, Tuple

import numpy as np
import pytest

from p3kv.errors import ProtocolError
from p3kv.server.admission import Handshakes
from p3kv.transport import Link
from p3kv.transport.tls import Tls, TlsLink, context_of_server, make_certificate
from p3kv.wire.connection import Connection
from p3kv.wire.credentials import Proofs
from p3kv.wire.protocol import FROM_WORKERS, Conversation
from tests.faults import Proxy
from tests.handling import Losing, Nobody
from tests.jobs import DEADLINE_S, ROOT, SCRIPTS, JobResult, environment, joined, run, run_job
from tests.memory_transport import Memory
from tests.served import Serving

sys.path.insert(0, str(SCRIPTS))
import exact_model

TRAINING = "sgd-servers"
ENCRYPTED = {"P3KV_ENCRYPT": 1}
ENDED_S = 60.0
KEY = bytes(range(32))


def trained(folder: Path, proxy: Proxy, **settings: object) -> Tuple[JobResult, Dict]:
    folder.mkdir()
    result = run_job(
        "exact.py", [folder, TRAINING], workers=2, servers=2,
        P3KV_SLICE_SIZE=exact_model.SLICE_SIZE, **{**proxy.settings, **settings},
    )  # fmt: skip
    return result, exact_model.saved(folder, TRAINING) if result.code == 0 else {}


def known_in(streams: List[bytearray], weights: Dict[str, np.ndarray]) -> List[str]:
    """Which weights somebody reads who has these bytes: their first elements are enough. Not those
    that begin with zeros, which are in the hello of TLS, too."""
    firsts = {name: value.ravel()[:10].tobytes() for name, value in weights.items()}
    return [
        name
        for name, first in firsts.items()
        if len(set(first)) > 10 and any(first in stream for stream in streams)
    ]


def test_who_listens_reads_no_weight_and_the_weights_are_the_same_bit_for_bit(
    tmp_path: Path,
) -> None:
    heard, weights = {}, {}
    for encrypt in (0, 1):
        with Proxy() as proxy:
            result, weights[encrypt] = trained(tmp_path / str(encrypt), proxy, P3KV_ENCRYPT=encrypt)
        assert result.code == 0, result.output
        heard[encrypt] = (proxy.to_servers, proxy.to_workers)
        assert [len(streams) for streams in heard[encrypt]] == [4, 4]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        np.testing.assert_array_equal(value, weights[1][name], name)
    initial = exact_model.weights(exact_model.network())
    for at_first, at_last, encrypt in ((True, True, 0), (False, False, 1)):
        to_servers, to_workers = heard[encrypt]
        assert bool(known_in(to_servers, initial)) == at_first
        assert bool(known_in(to_workers, weights[0])) == at_last
    sizes = [sum(map(len, [*heard[encrypt][0], *heard[encrypt][1]])) for encrypt in (0, 1)]
    assert sizes[0] < sizes[1] < 1.1 * sizes[0]


def test_who_puts_himself_in_the_middle_is_found_out() -> None:
    with Proxy(context_of_server(make_certificate(bytes(32)))) as proxy:
        place = {**proxy.settings, **ENCRYPTED}
        ended = joined(*((name, place) for name in ("server 0", "server 1", "worker 0")))
    assert proxy.intercepted == 0
    for name, result in ended.items():
        assert result.code == 1 and result.seconds < ENDED_S
        assert "Traceback" not in result.output, result.output
        for words in ("server", "can't show the certificate of this job", "intercept"):
            assert words in result.output, f"{name}: {result.output}"


def test_a_worker_that_encrypts_says_nothing_to_a_server_that_does_not() -> None:
    serving = Serving(1, **ENCRYPTED)
    try:
        (link,) = serving.connections()
        link.settimeout(ENDED_S)
        assert link.recv(3) == b"\x16\x03\x01"  # the hello of TLS
        link.sendall(bytes(100))
        said = b""
        while more := link.recv(4096):
            said += more
        reason = serving.hear().failure.reason
        link.close()
    finally:
        serving.close()
    assert "its TLS handshake is wrong" in reason
    assert len(said) < 1000


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (
            ("server 1", "worker 0", "worker 1"),
            ("worker", "encrypt=True", "server 0", "encrypt=False"),
        ),
        (("worker 1",), ("worker", "encrypt=True", "encrypt=False")),
        (("worker 0", "worker 1"), ("worker", "encrypt=True", "server 0", "encrypt=False")),
    ],
    ids=["a server does not", "a worker does", "no server does"],
)
def test_processes_that_do_not_agree_are_named(
    plan: Tuple[str, ...], told: Tuple[str, ...]
) -> None:
    names = ("server 0", "server 1", "worker 0", "worker 1")
    ended = joined(*((name, ENCRYPTED if name in plan else {}) for name in names))
    for name, result in ended.items():
        assert result.code == 1 and "Traceback" not in result.output, result.output
        for words in (*told, "P3KV_"):
            assert words in result.output, f"{name}: {result.output}"


def test_a_transport_of_the_user_s_own_is_encrypted_too() -> None:
    own = {"P3KV_PLUGINS": "own_transport", **ENCRYPTED}
    ended = joined(
        ("server 0", {**own, "P3KV_TRANSPORT": "unix"}), ("server 1", own), ("worker 0", own)
    )
    assert {result.code for result in ended.values()} == {0}, ended


def test_without_the_package_that_it_needs_it_says_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "cryptography.py").write_text("raise ImportError('there is none')")
    lacks = {"PYTHONPATH": f"{tmp_path}:{ROOT}", **ENCRYPTED}
    ended = joined(("server 0", ENCRYPTED), ("worker 0", ENCRYPTED), ("worker 1", lacks))
    for name, result in ended.items():
        assert result.code == 1 and "Traceback" not in result.output, result.output
        for words in ("worker 1", "there is none", "pip install 'cryptography>=38'"):
            assert words in result.output, f"{name}: {result.output}"
    launch = [sys.executable, "-m", "p3kv", "launch", "-n", "1", "--", "true"]
    result = run(launch, environment(**lacks), DEADLINE_S)
    assert result.code == 2 and result.output.startswith("p3kv launch: P3KV_ENCRYPT=1 needs the")


def ends(workers_key: bytes) -> Tuple[Link, Link]:
    """A worker's end of an encrypted link, and the server's, with the worker's first bytes."""
    listener = Tls(Memory(), KEY).listen("memory")
    near = Tls(Memory(), workers_key).connect(listener.address, 1.0)
    ((far,), _) = listener.accept(1)
    listener.close()
    return near, far


def hear(link: Link) -> int:
    """Has a link take what has come; how many bytes there are for the caller."""
    with suppress(BlockingIOError):
        return link.receive_into([memoryview(bytearray(10))])
    return 0


def test_a_server_answers_a_worker_and_not_who_has_another_key() -> None:
    near, far = ends(KEY)
    assert not far.is_known
    assert hear(far) == hear(near) == hear(far) == 0
    assert far.is_known
    assert far.send([memoryview(b"answer")]) == hear(near) == 6
    stranger, refused = ends(bytes(32))
    with pytest.raises(ProtocolError, match="handshake"):
        hear(refused)
    assert not refused.is_known
    refused.close()
    assert hear(stranger) == 0
    for link in (near, far, stranger):
        link.close()


def test_what_openssl_keeps_of_a_stranger_goes_with_its_connection() -> None:
    """And not when garbage is collected next, which may be thousands of strangers later."""
    handler = Losing()
    near, far = ends(bytes(32))
    assert isinstance(far, TlsLink)
    openssl = weakref.ref(far._tls)
    connection = Connection(far, Conversation(FROM_WORKERS, "worker"), handler, 4096)
    gc.disable()
    try:
        connection.receive()
        assert "its TLS handshake is wrong" in handler.reasons[0]
        connection.close()
        assert openssl() is None
    finally:
        gc.enable()
    for _ in range(2):
        far.close()
        with pytest.raises(OSError, match="has closed the link"):
            far.send([memoryview(b"more")])
        with pytest.raises(OSError, match="has closed the link"):
            hear(far)
    near.close()


def test_a_worker_in_its_handshake_is_not_closed_for_strangers_that_come_later() -> None:
    handshakes = Handshakes(Proofs(KEY, 0), 1)
    pairs = [ends(KEY if number == 1 else bytes(32)) for number in range(200)]
    servers = [
        Connection(far, Conversation(FROM_WORKERS, "worker"), Nobody(), 4096) for _, far in pairs
    ]
    servers[1].receive()
    assert servers[1].is_known
    closed = []
    for connection in servers:
        oldest = handshakes.add(connection)
        if oldest is not None:
            assert handshakes.waits_for_hello(oldest)
            handshakes.refuse(oldest, "there are too many")
            closed.append(servers.index(oldest))
    assert closed[0] == 0 and closed[1:] == list(range(2, len(closed) + 1))
    assert not handshakes.waits_for_hello(servers[1])
    assert len(closed) > 50
    for pair in pairs:
        for link in pair:
            link.close()


def test_a_key_s_certificate_is_the_same_in_all_processes() -> None:
    """Also with other versions of the package that makes it."""
    made = make_certificate(KEY)
    assert hashlib.sha256(made.public).hexdigest() == (
        "4e8fe4f1870e63a1c425c20f93880928bd012e8c75926f08bddcbb4b90a2bb7c"
    )
    assert made.public != make_certificate(bytes(32)).public
