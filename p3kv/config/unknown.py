"""Variables that begin as ours and mean nothing: misspelt ones."""

from __future__ import annotations

import os
from dataclasses import fields
from difflib import get_close_matches
from typing import Dict, Mapping, Optional, Sequence

from p3kv.common.secret import FILE_VARIABLE, VARIABLE
from p3kv.config.settings import PREFIX, Settings, variable_of

TRIAL = "P3KV_TRIAL"
_TOLD = "P3KV_TOLD"
# Each setting has a variable, too.
_USERS_VARIABLES = ("P3KV_JOB", "P3KV_OPTIMIZERS", "P3KV_PLUGINS", VARIABLE, FILE_VARIABLE)
PLACE = "P3KV_PLACE"
"""The place that a worker has taken, for what it starts."""
_OTHER_VARIABLES = (
    "P3KV_BESIDE_WORKER", "P3KV_LAUNCHED", "P3KV_LAUNCHER_FD", "P3KV_SCHEDULER_FD", PLACE, TRIAL,
    _TOLD,
)  # fmt: skip

_AKIN = 0.5
"""How much of two names with a word in common must be alike; of others it is 0.6."""


def unknown_variables(environ: Mapping[str, str] = os.environ) -> Dict[str, str]:
    """Variables that begin with P3KV_ and that p3kv does not read, with a warning for each.

    Without the warning nobody would notice a misspelt name. Variables of which the launcher has
    warned already are left out.
    """
    users = [*(variable_of(field.name) for field in fields(Settings)), *_USERS_VARIABLES]
    known = {*users, *_OTHER_VARIABLES}
    known.update(environ.get(_TOLD, "").split(","))
    unknown = {}
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            # Compared without the prefix, which would make all names alike.
            nearest = _nearest(name[len(PREFIX) :], [one[len(PREFIX) :] for one in users])
            wish = f"did you mean {PREFIX}{nearest}?" if nearest else "there is no such setting"
            unknown[name] = f"the variable {ascii(name)[1:-1]} is set and means nothing: {wish}"
    return unknown


def _nearest(name: str, meant: Sequence[str]) -> Optional[str]:
    """The name that is most alike, one with a whole word of it before all others; None if none
    is."""
    words = set(name.split("_"))
    akin = [one for one in meant if words & set(one.split("_"))]
    found = get_close_matches(name, akin, 1, _AKIN) or get_close_matches(name, meant, 1)
    return found[0] if found else None


def told_of(environ: Mapping[str, str]) -> Dict[str, str]:
    """Additions to a child's environment, so that it does not warn of these variables again."""
    unknown = unknown_variables(environ)
    return {_TOLD: ",".join([*filter(None, [environ.get(_TOLD)]), *unknown])} if unknown else {}
