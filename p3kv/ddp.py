"""`python -m p3kv.ddp SCRIPT [ARGS ...]`, or `-m MODULE` in the place of SCRIPT: a script that
wraps its model in torch's DistributedDataParallel, which p3kv trains.

The script is what this module becomes, so that processes that it starts by `multiprocessing` import
this module in its place, and train by p3kv, too. So do ranks that Lightning starts from it.
"""

import importlib
import io
import os
import sys

from p3kv import config
from p3kv.tools.commands import run

if __name__ == "__main__":
    _given, _above = sys.argv[1:], config.script_above()
    _is_file = bool(_given) and os.path.isfile(_given[0])
    if _above and not _is_file and _given == run.located(_above)[-1]:
        _given = _above  # the script's arguments alone, by which Lightning starts its other ranks
    if _given in ([], ["-m"]):
        sys.exit("usage: python -m p3kv.ddp SCRIPT|-m MODULE [ARGS ...]")
    if not run.prepare(_given):
        sys.exit(2)
    config.note_script(_given)
if __name__ in ("__main__", "__mp_main__"):
    importlib.import_module("p3kv.torch.ddp")
    __file__, __package__, _arguments = run.located(config.script_above())
    with io.open_code(__file__) as _script:
        _code = compile(_script.read(), __file__, "exec")
    try:
        exec(_code, globals())
    except SystemExit as end:
        # However the script has raised it: a worker tells the others what it gives to `sys.exit`.
        sys.exit(end.code)
