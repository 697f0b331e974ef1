"""Runs scripts one after the other in one job: `in_turn.py one.py 1 2 , other.py`."""

import runpy
import sys
from itertools import groupby
from pathlib import Path

for is_comma, words in groupby(sys.argv[1:], ",".__eq__):
    if not is_comma:
        script, *sys.argv[1:] = words
        sys.argv[0] = str(Path(__file__).with_name(script))
        runpy.run_path(sys.argv[0], run_name="__main__")
