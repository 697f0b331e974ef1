"""The JSON file of a measured figure: on the disk, and whole, after every run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence

_FORMAT = 1


class Records:
    """What is known of one figure, kept in `path`; opens what an earlier process left there.

    `about` says in words what was measured. Each record in `runs` has the parameters that
    identify the run, `machine` (its place in `machines`), `versions` of what is not named there,
    and `iteration_s` unless it failed; `failures` has the reason of each attempt that failed.
    `links` are checks of the links. `summary` and `simulated` are worked out from the rest or
    computed without measuring.

    Raises ValueError when the file is there but is not such a file. For one thread; two processes
    must not measure into one file.
    """

    def __init__(self, path: Path, about: Mapping[str, str]) -> None:
        self.path = path
        self._document: Dict[str, Any] = {"format": _FORMAT}
        if path.exists():
            try:
                self._document = json.loads(path.read_text(encoding="utf-8"))
                known = self._document["format"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} has no measured runs: move it away") from error
            if known != _FORMAT:
                raise ValueError(f"{path} has format {known}, not {_FORMAT}: move it away")
        self._document["about"] = dict(about)
        self.machines: List[Dict[str, Any]] = self._document.setdefault("machines", [])
        self.links: List[Dict[str, Any]] = self._document.setdefault("links", [])
        self.simulated: List[Dict[str, Any]] = self._document.setdefault("simulated", [])
        self.runs: List[Dict[str, Any]] = self._document.setdefault("runs", [])

    @property
    def summary(self) -> Any:
        """What the figure makes of its runs."""
        return self._document.get("summary")

    @summary.setter
    def summary(self, value: Any) -> None:
        self._document["summary"] = value
        self._write()

    def begin(self, description: Mapping[str, Any]) -> int:
        """Notes that measuring goes on, and on what; returns the machine's place in `machines`."""
        start = {
            "begun": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "load_average_before": [round(load, 2) for load in os.getloadavg()],
        }
        known = [{**machine, "starts": None} for machine in self.machines]
        wanted = {**description, "starts": None}
        if wanted not in known:
            known.append(wanted)
            self.machines.append({**description, "starts": []})
        place = known.index(wanted)
        self.machines[place]["starts"].append(start)
        self._write()
        return place

    def add_run(self, run: Mapping[str, Any]) -> None:
        self.runs.append(dict(run))
        self._write()

    def drop_runs(self, runs: Sequence[Mapping[str, Any]]) -> None:
        """Forgets runs, to measure them again."""
        self.runs[:] = [run for run in self.runs if run not in runs]
        self._write()

    def add_links(self, check: Mapping[str, Any]) -> None:
        self.links.append(dict(check))
        self._write()

    def add_simulated(self, simulated: Mapping[str, Any]) -> None:
        self.simulated.append(dict(simulated))
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Replaced as a whole: whoever stops this process, one of the two versions is there.
        unfinished = self.path.with_suffix(".json.unfinished")
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write(_text(self._document))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, self.path)


def _text(document: Mapping[str, Any]) -> str:
    """JSON with one line for each run, so that people and version control can read it."""
    fields = []
    for name in ("format", "about", "summary", "machines", "links", "simulated", "runs"):
        if name not in document:
            continue
        value = document[name]
        if isinstance(value, list) and value:
            lines = ",\n".join("  " + json.dumps(item) for item in value)
            text = f"[\n{lines}\n ]"
        else:
            text = json.dumps(value, indent=1).replace("\n", "\n ")
        fields.append(f' "{name}": {text}')
    return "{\n" + ",\n".join(fields) + "\n}\n"
