"""DualPipe, PipeDream and data parallelism, simulated: schedules, transfers, throughput, breakdown.

python -m experiments.dualpipe
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence, Tuple

from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.campaign import options
from experiments.drawing import output
from experiments.dualpipe import pictures
from experiments.dualpipe.comparison import HOSTS, compare, staleness
from experiments.models import MODELS, load

COMPARED = (*MODELS, "gpt2_small", "inception_v4", "snn")
RATIOS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
_BARS_RATIO = 1
"""M/C of what the bars show."""


def report(row: Dict[str, Any]) -> str:
    """A line of speed-ups."""
    systems = " ".join(f"{name} {of['speed_up']:.2f}" for name, of in row["systems"].items())
    return f"{row['model']:13}{row['workers']} workers, M/C {row['ratio']:<7g}{systems}"


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = options.arguments(__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=COMPARED, default=COMPARED, metavar="MODEL")
    parser.add_argument(
        "--quick", action="store_true", help="two ratios of M/C, into files of their own name"
    )
    chosen = parser.parse_args(argv)
    ratios = RATIOS[1::3] if chosen.quick else RATIOS
    cases = [(name, HOSTS, ratio) for name in chosen.models for ratio in ratios]
    cases += [(name, HOSTS // 2, _BARS_RATIO) for name in chosen.models]
    rows = [
        compare(load(name), workers, ratio)
        for name, workers, ratio in tqdm(cases, desc="compared", unit="case")
    ]
    print("\n".join(map(report, rows)))

    most = [row for row in rows if row["workers"] == HOSTS]
    fast_links = [row for row in most if row["ratio"] == ratios[0]]
    at_bars = [row for row in rows if row["ratio"] == _BARS_RATIO]
    most_at_bars = [row for row in at_bars if row in most]
    found: Dict[str, Tuple[Any, Figure]] = {
        "timelines": (staleness(HOSTS), pictures.timelines(HOSTS)),
        "transfers": (fast_links, pictures.transfers(fast_links)),
        "throughput": (at_bars, pictures.throughput(at_bars)),
        "breakdown": (most_at_bars, pictures.breakdown(most_at_bars)),
        "links": (most, pictures.by_link(most)),
    }
    for name, (numbers, figure) in found.items():
        output.save(chosen.output, f"dualpipe_{name}{'-quick' * chosen.quick}", numbers, figure)


if __name__ == "__main__":
    main()
