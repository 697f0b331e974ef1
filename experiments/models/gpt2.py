"""GPT-2 small (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019).

Twelve blocks of width 768, a vocabulary of 50,257 and a context of 1,024: 124,439,808 parameters.
The output reads the embedding's weight again. This tied weight is one parameter: its gradient is
complete when the backward pass reaches the embedding, and the next forward pass needs it first.
"""

from __future__ import annotations

from typing import Iterator, List, Tuple

from p3kv.report.forecast import Layer, Parameter

BLOCKS, WIDTH, VOCABULARY, CONTEXT = 12, 768, 50257, 1024


def gpt2_small(sequences: int) -> List[Layer]:
    """The layers in forward order, with the work of so many sequences of full length.

    Attention is counted with all pairs of tokens, as kernels without a mask compute it. Inside a
    block, what crosses a cut is the residual stream and what the layer has made of it.
    """
    tokens = sequences * CONTEXT
    stream = tokens * WIDTH
    layers = [
        Layer("wte", (Parameter("wte.weight", (VOCABULARY, WIDTH)),), 0.0, stream),
        Layer("wpe", (Parameter("wpe.weight", (CONTEXT, WIDTH)),), 0.0, stream),
    ]
    for block in range(BLOCKS):
        layers += _block(f"h.{block}", tokens)
    layers.append(_norm("ln_f", tokens, beside=0))
    layers.append(Layer("lm_head", (), flops=2.0 * tokens * WIDTH * VOCABULARY))
    return layers


def _block(name: str, tokens: int) -> Iterator[Layer]:
    stream = tokens * WIDTH
    yield _norm(f"{name}.ln_1", tokens, stream)
    attention = 4.0 * tokens * CONTEXT * WIDTH
    yield _linear(f"{name}.attn.c_attn", (WIDTH, 3 * WIDTH), tokens, 2 * stream, attention)
    yield _linear(f"{name}.attn.c_proj", (WIDTH, WIDTH), tokens, stream)
    yield _norm(f"{name}.ln_2", tokens, stream)
    yield _linear(f"{name}.mlp.c_fc", (WIDTH, 4 * WIDTH), tokens, 5 * stream)
    yield _linear(f"{name}.mlp.c_proj", (4 * WIDTH, WIDTH), tokens, stream)


def _linear(
    name: str, shape: Tuple[int, int], tokens: int, crossing_elems: int, more: float = 0.0
) -> Layer:
    """A product with a matrix, and `more` work that follows it without parameters."""
    parameters = (Parameter(f"{name}.weight", shape), Parameter(f"{name}.bias", shape[1:]))
    flops = 2.0 * tokens * shape[0] * shape[1] + more
    return Layer(name, parameters, flops, crossing_elems)


def _norm(name: str, tokens: int, beside: int) -> Layer:
    """A normalisation; `beside` elements of the residual stream pass it by."""
    parameters = (Parameter(f"{name}.weight", (WIDTH,)), Parameter(f"{name}.bias", (WIDTH,)))
    return Layer(name, parameters, 8.0 * tokens * WIDTH, tokens * WIDTH + beside)
