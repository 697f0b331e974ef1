"""Makes a throttled cluster from the command line, or limits a real interface.

Hosts are network namespaces of this machine, joined by one switch, each behind a link that is
limited in both directions. Needs root and the tools `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import subprocess
import sys
import threading
from typing import Sequence

from experiments.cluster import Cluster, ClusterError
from experiments.cluster.throttle import DeviceLimit


def _print_goodput(cluster: Cluster, seconds: float, at_once: bool) -> None:
    print(f"TCP payload in Mbit/s, {cluster.congestion_control}:")
    for link in cluster.goodput(seconds, at_once):
        expected = link.expected_mbit_s
        share = (
            "no limit" if expected is None else f"{link.mbit_s / expected:.1%} of {expected:.1f}"
        )
        print(f"  {link.sender} -> {link.receiver}  {link.mbit_s:10.1f}  {share}", flush=True)


def _check(options: argparse.Namespace) -> int:
    with Cluster(options.hosts, options.rate, options.congestion_control) as cluster:
        _print_goodput(cluster, options.seconds, options.at_once)
    return 0


def _run(options: argparse.Namespace) -> int:
    with Cluster(options.hosts, options.rate, options.congestion_control) as cluster:
        _print_goodput(cluster, options.seconds, options.at_once)
        addresses = ",".join(host.address for host in cluster.hosts)
        ended: queue.Queue[int] = queue.Queue()
        for host in cluster.hosts:
            env = {**os.environ, "P3_HOST_INDEX": str(host.index), "P3_HOST_ADDRESSES": addresses}
            process = host.popen(options.command, env=env)
            wait = threading.Thread(target=lambda p=process: ended.put(p.wait()), daemon=True)
            wait.start()
        # The first failure ends the run: the others would wait for the one that failed.
        return next((code for code in (ended.get() for _ in cluster.hosts) if code != 0), 0)


def _limit(options: argparse.Namespace) -> int:
    with DeviceLimit(options.device, options.rate):
        print(f"{options.device} sends at most {options.rate} Mbit/s", flush=True)
        if options.command:
            return subprocess.run(options.command).returncode
        print("Ctrl-C ends the limit", flush=True)
        threading.Event().wait()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.cluster", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    check = actions.add_parser("check", help="make a cluster, measure its links, remove it")
    run = actions.add_parser(
        "run",
        help="make a cluster, measure its links, run a command on every host, remove it",
        epilog="The command finds P3_HOST_INDEX and P3_HOST_ADDRESSES (commas between) in its "
        "environment. The first that fails ends the others.",
    )
    for made in (check, run):
        made.add_argument("--hosts", type=int, default=4)
        made.add_argument("--rate", type=float, metavar="MBIT_S", help="default: no limit")
        made.add_argument("--congestion-control", default="cubic", metavar="NAME")
        made.add_argument("--seconds", type=float, default=0.5, help="to measure each link for")
        made.add_argument("--at-once", action="store_true", help="measure all links at a time")
    limit = actions.add_parser(
        "limit", help="limit what a real interface sends, until Ctrl-C or the command's end"
    )
    limit.add_argument("device")
    limit.add_argument("rate", type=float, metavar="MBIT_S")
    run.set_defaults(act=_run)
    check.set_defaults(act=_check)
    limit.set_defaults(act=_limit)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command line `arguments` and return the exit status."""
    # Everything behind the first `--` is the command, with options that are not ours to read.
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = _parser()
    options = parser.parse_args(arguments[:cut])
    options.command = list(arguments[cut + 1 :])
    if options.action == "run" and not options.command:
        parser.error("run needs a command, behind --")
    if options.action == "check" and options.command:
        parser.error("check runs no command")
    try:
        code = options.act(options)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 128 - code if code < 0 else code  # as a shell reports a process that a signal ended


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
