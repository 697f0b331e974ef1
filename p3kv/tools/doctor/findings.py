"""Findings of a check, and what one host tells of itself."""

from __future__ import annotations

from typing import Dict, List, Optional

import msgspec

OK, WARNING, PROBLEM = "ok", "warning", "problem"
"""Levels: fine; worth a look, but jobs run; jobs fail."""


class Finding(msgspec.Struct, frozen=True):
    """One line for people. `mend` says what to do; empty where there is nothing to do."""

    level: str
    text: str
    mend: str = ""


class Seen(msgspec.Struct, frozen=True):
    """One host: findings, versions by name, and the address at which its processes listen; None if
    they can't."""

    findings: List[Finding]
    versions: Dict[str, str]
    address: Optional[str]
