"""`p3kv doctor`: what would keep a job from running well, before it starts."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Iterable

from p3kv.tools.commands.arguments import hosts

if TYPE_CHECKING:
    from p3kv.tools.doctor import Finding

HELP = "check hosts and settings before a job"
USAGE = None
DESCRIPTION = """\
Check, before a job starts, what could keep it from running well here: settings
and secret, versions of the framework and of what p3kv needs, addresses, limits.
With -H not this host is checked but those that `p3kv launch -H` would reach,
and also whether their versions agree, how far their clocks are apart, and how
fast each reaches each other one. Lines begin with ok, warning or problem, and
say what to mend. The exit code is 1 if there is a problem.

examples: p3kv doctor
          p3kv doctor -H host1,host2"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "-H",
        "--hosts",
        type=hosts,
        metavar="HOSTS",
        help="the job's hosts, as for p3kv launch (default: this host alone)",
    )


def do(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    from p3kv.tools import doctor
    from p3kv.tools.doctor_hosts import examine_hosts

    found = _show("settings", doctor.check_settings())
    if options.hosts is None:
        found += _show("this host", doctor.examine().findings)
    else:
        for title, findings in examine_hosts(options.hosts):
            found += _show(title, findings)
    problems = [one for one in found if one.level == doctor.PROBLEM]
    print(f"\n{len(problems)} problems" if len(problems) != 1 else "\n1 problem")
    return 1 if problems else 0


def _show(title: str, findings: Iterable[Finding]) -> list[Finding]:
    """Prints a part as soon as it is there; returns its findings."""
    found = list(findings)
    print(f"{title}:")
    for one in found:
        print(f"  {one.level:8} {one.text}", flush=True)
        if one.mend:
            print(f"           to mend it: {one.mend}", flush=True)
    return found
