"""Agent on each host for `p3kv doctor -H`: answers questions until the launcher is gone."""

from __future__ import annotations

import socket
import time
from typing import Optional

import msgspec

from p3kv.config import Launch
from p3kv.tools.doctor.probes import Target, rate_bytes_s, round_trip_s
from p3kv.tools.doctor.questions import Look, Looked, Measured, Ping, Question, TellTime, Time
from p3kv.tools.doctor.this_host import examine


def main() -> None:
    """Answers each line on the link to the launcher."""
    launch = Launch.of_a_worker(None)
    assert launch.launcher_fd is not None, "p3kv doctor starts this"
    decoder: msgspec.json.Decoder[Question] = msgspec.json.Decoder(Question)
    agent = _Agent()
    with socket.socket(fileno=launch.launcher_fd) as link, link.makefile("rb") as questions:
        for line in questions:
            link.sendall(msgspec.json.encode(agent.answer(decoder.decode(line))) + b"\n")
    agent.close()


class _Agent:
    def __init__(self) -> None:
        self._token = ""
        self._target: Optional[Target] = None

    def close(self) -> None:
        if self._target is not None:
            self._target.close()

    def answer(self, question: Question) -> msgspec.Struct:
        if isinstance(question, TellTime):
            return Time(time.time())
        if isinstance(question, Look):
            return self._look(question)
        measure = round_trip_s if isinstance(question, Ping) else rate_bytes_s
        try:
            return Measured(measure(question.address, question.port, self._token))
        except OSError as error:
            return Measured(problem=error.strerror or str(error))

    def _look(self, question: Look) -> Looked:
        seen = examine(question.root_host)
        self._token = question.token
        if seen.address is None:
            return Looked(seen, None)
        self._target = Target(seen.address, self._token)
        return Looked(seen, self._target.port)


if __name__ == "__main__":
    main()
