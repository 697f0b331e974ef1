"""Figure 5 of P3: how the parameters of the four models are spread over their layers.

python -m experiments.figure5
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from tqdm import tqdm

from experiments.campaign import options
from experiments.drawing import output
from experiments.models import MODELS, load

_TITLES = {
    "resnet50": "(a) ResNet-50",
    "inception_v3": "(b) Inception-v3",
    "vgg19": "(c) VGG-19",
    "sockeye": "(d) Sockeye",
}


def measure() -> Dict[str, Any]:
    """Returns for each model its trained elements, in all and by layer in forward order."""
    numbers = {}
    for name in tqdm(MODELS, desc="models", unit="model"):
        model = load(name)
        heaviest = max(model.layers, key=lambda layer: layer.elems)
        numbers[name] = {
            "elems": model.elems,
            "size_bytes": model.size_bytes,
            "heaviest": heaviest.name,
            "heaviest_share": heaviest.elems / model.elems,
            "layers": [{"name": layer.name, "elems": layer.elems} for layer in model.layers],
        }
    return numbers


def draw(numbers: Dict[str, Any]) -> Figure:
    output.style()
    figure, axes = plt.subplots(2, 2, figsize=(8, 5))
    for axis, (name, model) in zip(axes.flat, numbers.items()):
        _draw_model(axis, _TITLES[name], model)
    return figure


def _draw_model(axis: Axes, title: str, model: Dict[str, Any]) -> None:
    millions = [layer["elems"] / 1e6 for layer in model["layers"]]
    names = [layer["name"] for layer in model["layers"]]
    peak = names.index(model["heaviest"])
    colours = [output.COLOURS["plain"]] * len(millions)
    colours[peak] = output.COLOURS["emphasis"]
    axis.bar(
        range(1, len(millions) + 1), millions, width=1.0 if len(names) > 50 else 0.8, color=colours
    )
    left = peak < len(names) / 2
    axis.annotate(
        f"{names[peak]}: {model['heaviest_share']:.1%}",
        (peak + 1, millions[peak]),
        xytext=(4 if left else -4, 3),
        textcoords="offset points",
        ha="left" if left else "right",
        color=output.COLOURS["emphasis"],
    )
    axis.set_title(f"{title}: {model['elems'] / 1e6:.1f} million in {len(names)} layers")
    axis.set_xlabel("layer, in forward order")
    axis.set_ylabel("parameters (millions)")
    axis.set_ylim(0, max(millions) * 1.12)
    axis.set_xlim(0.3, len(names) + 0.7)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def main(argv: Optional[Sequence[str]] = None) -> None:
    arguments = options.arguments(__doc__.splitlines()[0]).parse_args(argv)
    numbers = measure()
    output.save(arguments.output, "figure5", numbers, draw(numbers))


if __name__ == "__main__":
    main()
