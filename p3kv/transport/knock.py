"""How a worker's first bytes on an encrypted connection show that it has the job's key.

TLS lets a client name the host that it wants, in the clear and before anything else (SNI). A worker
names a random number with a proof, an HMAC. So a server answers no stranger, computes nothing for
one, and knows whose handshake is under way. Somebody who has seen the name can say it again, and
gets no further: what follows needs the key.
"""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256
from typing import Optional

_DIGITS = 32
"""Hexadecimal, of the number and of the proof. TLS allows 63 letters between two points."""


def make_knock(key: bytes) -> str:
    """A name to ask for, another one each time."""
    number = secrets.token_hex(_DIGITS // 2)
    return f"{number}.{_proof(key, number)}"


def is_right_knock(key: bytes, name: Optional[str]) -> bool:
    """Whether somebody who has the key has made this name."""
    number, _, proof = (name or "").partition(".")
    return hmac.compare_digest(proof.encode(), _proof(key, number).encode())


def _proof(key: bytes, number: str) -> str:
    return hmac.new(key, b"p3kv knock\0" + number.encode(), sha256).hexdigest()[:_DIGITS]
