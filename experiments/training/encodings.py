"""How gradients and values travel while a network is trained."""

from __future__ import annotations

from typing import Dict, NamedTuple

WARM_UP_SHARE = 0.2
"""Of all steps: DGC's sparsity grows meanwhile. Its paper takes 4 epochs of 164, which alone have
as many steps as our whole trainings."""


class Encoding(NamedTuple):
    """A codec for each direction, and a consistency rule, as a job's environment names them."""

    title: str
    gradients: str = "identity"
    values: str = "identity"
    consistency: str = "bulk_synchronous"

    def environment(self, steps: int) -> Dict[str, str]:
        """The settings of a job with so many steps."""
        warm_up_steps = round(WARM_UP_SHARE * steps)
        return {
            "P3KV_GRADIENT_CODEC": self.gradients.format(warm_up_steps=warm_up_steps),
            "P3KV_VALUE_CODEC": self.values,
            "P3KV_CONSISTENCY": self.consistency,
        }


ENCODINGS = {
    "exact": Encoding("exact", "identity"),
    "float16": Encoding("float16", "float16"),
    "bfloat16": Encoding("bfloat16", "bfloat16"),
    "2bit": Encoding("2 bits", "2bit:threshold=0.1"),
    "topk": Encoding("top 1 %", "topk:share=0.01"),
    "topk_both": Encoding("top 1 %, both ways", "topk:share=0.01", "topk:share=0.01"),
    "dgc": Encoding("DGC, top 0.1 %", "dgc:share=0.001,warmup_steps={warm_up_steps}"),
}
"""By name. The threshold of two bits is the better of 0.1 and MXNet's 0.5 in the first epochs."""

LOCAL = {
    "exact": Encoding("exact"),
    **{
        f"local_{steps}": Encoding(
            f"H = {steps}", consistency=f"local:steps={steps},streaming=false"
        )
        for steps in (1, 10, 50, 200)
    },
    "streaming_50": Encoding("H = 50, streaming", consistency="local:steps=50"),
}
"""Workers that train by themselves for H steps, beside exact synchrony."""

_TOP, _STALE = "topk:share=0.01", "bounded:staleness=5,lazy=1"
THESIS = {
    "in_turn": Encoding("exact, computing and sending in turn"),
    "p3kv": Encoding("exact, wait-free, by priority"),
    "all": Encoding("all: priority, staleness 5, top-1 %", _TOP, _TOP, _STALE),
}
"""All that the thesis optimizes, beside exact training."""
