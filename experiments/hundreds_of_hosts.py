"""Up to 256 hosts, simulated: what p3kv's slices cost there, and what equal parts would.

python -m experiments.hundreds_of_hosts
"""

from __future__ import annotations

import argparse
from typing import Optional, Sequence

from experiments.campaign.many_hosts import scaled

HOSTS = (4, 8, 16, 32, 64, 128, 256)


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", help="(default: %(default)s)")
    parser.add_argument(
        "--hosts", nargs="+", type=int, default=HOSTS, metavar="N", help="(default: 4 to 256)"
    )
    chosen = parser.parse_args(argv)
    print(f"{'hosts':>5}  {'plan':12}{'of linear':>10}{'of the bound':>14}{'frames':>9}")
    for hosts in chosen.hosts:
        for one in scaled(chosen.model, hosts):
            print(
                f"{hosts:>5}  {one.plan:12}{one.of_linear:>10.3f}{one.of_bound:>14.3f}"
                f"{one.frames:>9.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
