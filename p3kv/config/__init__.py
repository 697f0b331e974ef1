"""Every setting, and all that is read from the environment: no other room reads it.

`Settings` say how p3kv works, and are set in code (`p3kv.configure`) or by environment. `Launch`
says which process of its job this is, and comes from the launcher's environment.
"""

from p3kv.config.launch import (
    ROLES,
    Launch,
    forget_rank,
    note_place,
    note_script,
    root_host,
    root_port,
    script_above,
    serves,
    take_place,
    trains_alone,
    where_secret_is,
    worker_above,
)
from p3kv.config.overrides import configure, current, freeze, wants_traceback
from p3kv.config.ranks import launcher_store
from p3kv.config.settings import (
    MAX_PATH_CHARS,
    MAX_SLICE_ELEMS,
    Settings,
    add_aliases,
    apply_verbosity,
    check_together,
    told_of,
    unknown_variables,
)
from p3kv.config.trials import Tuned, environment_of, trial
from p3kv.config.variables import flag, optimizer_modules, plugins, wants_colours

__all__ = [
    "MAX_PATH_CHARS", "MAX_SLICE_ELEMS", "ROLES", "Launch", "Settings", "Tuned", "add_aliases",
    "apply_verbosity", "check_together", "configure", "current", "environment_of", "flag",
    "forget_rank", "freeze", "launcher_store", "note_place", "note_script", "optimizer_modules",
    "plugins", "root_host", "root_port", "script_above", "serves", "take_place",
    "told_of", "trains_alone", "trial", "unknown_variables", "wants_colours", "wants_traceback",
    "where_secret_is", "worker_above",
]  # fmt: skip
