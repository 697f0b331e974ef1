"""Sends malformed frames to the ports of a real job while it trains, and shows what they do to it.

    python -m scripts.malformed --frames 1000000

Each frame goes to a server or to the scheduler over a connection of its own, from a stranger: the
first wrong frame ends a connection. At the end every worker compares its weights with those that it
computes itself. The script prints the memory and descriptors of each process before and during the
attack, as JSON, and ends with an error if the job did.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import struct
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Deque, Dict, List

import psutil

from p3kv.wire.credentials import HELLO_BYTES
from p3kv.wire.header import MAGIC, Kind
from p3kv.wire.messages import PROTOCOL_VERSION, TOKEN_BYTES, DataHello, JobSettings, encode
from tests.jobs import TrainingJob, connections_of
from tests.served import packed

_GREETING = b"\xff" + b"\x00" * 8 + b"\x7f\x03\x00"
_WORDS = encode(DataHello(0, JobSettings(), bytes(TOKEN_BYTES)))
_KEPT = 200
"""Connections that stay open at a time, so that some are cut and some wait for an answer."""
_LOOK_EVERY = 5000


def _noise(chance: random.Random, count: int) -> bytes:
    return bytes(chance.getrandbits(8) for _ in range(count))


def _to_a_server(chance: random.Random) -> bytes:
    kind = chance.choice([*Kind, 0, 255])
    size = chance.choice([0, 1, HELLO_BYTES, HELLO_BYTES, 4096, 2**20, 2**32 - 1])
    payload = chance.choice([_noise(chance, min(size, 300)), _WORDS, b"\x91" * 300])
    magic = MAGIC if chance.random() < 0.8 else chance.getrandbits(32)
    fields = {"magic": magic, "version": PROTOCOL_VERSION} if kind == Kind.HELLO else {}
    frame = bytearray(packed(kind, chance.randrange(3), size, **fields) + payload)
    if chance.random() < 0.3:
        frame[chance.randrange(len(frame))] = chance.getrandbits(8)
    return bytes(frame[: chance.choice([len(frame), chance.randrange(1, len(frame) + 1)])])


def _to_the_scheduler(chance: random.Random) -> bytes:
    mechanism = chance.choice([b"CURVE", b"NULL", _noise(chance, 5)]).ljust(20, b"\x00")
    hello = b"\x04\xc8\x05HELLO\x01\x00" + _noise(chance, 192)
    words = _GREETING + mechanism + b"\x00" * 32 + chance.choice([hello, _noise(chance, 100)])
    return words[: chance.choice([len(words), chance.randrange(1, len(words) + 1)])]


def _state(parts: Dict[str, psutil.Process]) -> Dict[str, Dict[str, int]]:
    return {
        name: {"rss_kib": part.memory_info().rss // 1024, "descriptors": part.num_fds()}
        for name, part in parts.items()
    }


def _attack(ports: List[int], scheduler: int, count: int, parts: Dict[str, psutil.Process]) -> dict:
    chance = random.Random(1)
    kept: Deque[socket.socket] = deque()
    before = _state(parts)
    most = {name: dict(values) for name, values in before.items()}
    course = []
    for number in range(count):
        port = chance.choice([*ports, scheduler])
        words = _to_the_scheduler(chance) if port == scheduler else _to_a_server(chance)
        stranger = socket.socket()
        # Nobody has to remember a connection that is reset.
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.settimeout(10.0)
        stranger.connect(("127.0.0.1", port))
        stranger.sendall(words)
        kept.append(stranger)
        if len(kept) > _KEPT:
            kept.popleft().close()
        if number % _LOOK_EVERY == 0:
            now = _state(parts)
            for name, values in now.items():
                for what, value in values.items():
                    most[name][what] = max(most[name][what], value)
            memory = {name: values["rss_kib"] for name, values in now.items()}
            course.append({"frames": number, **memory})
            print(f"{number} frames", file=sys.stderr, flush=True)
    for stranger in kept:
        stranger.close()
    return {"before": before, "most": most, "after": _state(parts), "rss_kib": course}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=1_000_000)
    frames: int = parser.parse_args().frames
    with tempfile.TemporaryDirectory() as folder, TrainingJob(Path(folder), 2, 2) as job:
        job.wait_until_training()
        parts = job.parts()
        listening = {
            name: connections_of(parts[name].pid, psutil.CONN_LISTEN)[0][0]
            for name in ("server 0", "server 1", "scheduler")
        }
        scheduler = listening.pop("scheduler")
        start = time.monotonic()
        report = _attack(list(listening.values()), scheduler, frames, parts)
        report.update(frames=frames, seconds=round(time.monotonic() - start, 1))
        job.stop()
        result = job.result(timeout_s=60)
    print(json.dumps(report, indent=1))
    print(result.output[-2000:], file=sys.stderr)
    right = sum("all weights are right" in result.said_by(f"worker {rank}") for rank in range(2))
    sys.exit(0 if result.code == 0 and right == 2 else "the job did not come to the right end")


if __name__ == "__main__":
    main()
