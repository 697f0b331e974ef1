"""Runs a script of this folder on one of several hosts of the loopback interface.

Arguments: how many workers a host has, the script, and its arguments. Workers 0, 1, ... fill hosts
127.0.0.1, 127.0.0.2, ...; DMLC_NODE_HOST is for the servers.
"""

import os
import runpy
import sys
from pathlib import Path

own, per_host, script, *arguments = sys.argv
host = 1 + int(os.environ["DMLC_WORKER_ID"]) // int(per_host)
os.environ["DMLC_NODE_HOST"] = f"127.0.0.{host}"
path = Path(own).parent / script
sys.argv = [str(path), *arguments]
runpy.run_path(str(path), run_name="__main__")
