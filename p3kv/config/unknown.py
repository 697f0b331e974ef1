"""Variables that begin as ours and mean nothing: misspelt ones."""

from __future__ import annotations

import os
from dataclasses import fields
from difflib import get_close_matches
from typing import Dict, Mapping

from p3kv.config.settings import PREFIX, Settings, variable_of
from p3kv.secret import FILE_VARIABLE, VARIABLE

TRIAL = "P3KV_TRIAL"
_TOLD = "P3KV_TOLD"
# Each setting has a variable, too.
_USERS_VARIABLES = ("P3KV_JOB", "P3KV_OPTIMIZERS", "P3KV_PLUGINS", VARIABLE, FILE_VARIABLE)
_OTHER_VARIABLES = ("P3KV_LAUNCHED", "P3KV_LAUNCHER_FD", "P3KV_SCHEDULER_FD", TRIAL, _TOLD)


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
            meant = [one[len(PREFIX) :] for one in users]
            nearest = get_close_matches(name[len(PREFIX) :], meant, n=1)
            wish = f"did you mean {PREFIX}{nearest[0]}?" if nearest else "there is no such setting"
            unknown[name] = f"the variable {ascii(name)[1:-1]} is set and means nothing: {wish}"
    return unknown


def told_of(environ: Mapping[str, str]) -> Dict[str, str]:
    """What to add to a child's environment, so that it does not warn of these variables again."""
    unknown = unknown_variables(environ)
    return {_TOLD: ",".join([*filter(None, [environ.get(_TOLD)]), *unknown])} if unknown else {}
