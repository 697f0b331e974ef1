"""Sockeye's LSTM encoder-decoder with attention (Hieber et al., arXiv:1712.05690), in gluon.

Sizes and structure are those of the Sockeye 1.5 run in the TBD benchmark suite (Zhu et al.,
arXiv:1803.06905; `MachineTranslation-Seq2Seq/Sockeye/scripts/sockeye_1.5-iwslt15_en-vi.sh`), a
suite that the P3 paper cites: two layers of 512 on each side, embeddings of 512, attention by a
perceptron of 512, on IWSLT15 English to Vietnamese, whose source vocabulary (17,191 words) is
more than twice the target's (7,709).
"""

from __future__ import annotations

from typing import Any, Optional

import mxnet as mx
from mxnet.gluon import nn, rnn

SOURCE_WORDS = 17191
TARGET_WORDS = 7709
EMBED_ELEMS = 512
HIDDEN_ELEMS = 512
ATTENTION_ELEMS = 512


class Sockeye(mx.gluon.HybridBlock):
    """Logits of a target sentence for a source sentence, teacher-forced.

    Inputs: source tokens (batch, source length) and target tokens (batch, `target_length`).
    Output: (batch, `target_length`, target words). Unlike in Sockeye, the sentences of a batch
    have one length: masks have no parameters and next to no work.
    """

    def __init__(self, target_length: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.source_embed = nn.Embedding(SOURCE_WORDS, EMBED_ELEMS, prefix="source_embed_")
            # The first layer reads both ways, with half of the units each.
            self.encoder_birnn = rnn.LSTM(
                HIDDEN_ELEMS // 2,
                bidirectional=True,
                layout="NTC",
                input_size=EMBED_ELEMS,
                prefix="encoder_birnn_",
            )
            self.encoder_rnn = rnn.LSTM(
                HIDDEN_ELEMS, layout="NTC", input_size=HIDDEN_ELEMS, prefix="encoder_rnn_"
            )
            self.target_embed = nn.Embedding(TARGET_WORDS, EMBED_ELEMS, prefix="target_embed_")
            self.decoder = _Decoder(target_length, prefix="decoder_")
            self.logits = _dense(TARGET_WORDS, "logits_")

    def hybrid_forward(self, F: Any, source: Any, target: Any) -> Any:
        encoded = self.encoder_rnn(self.encoder_birnn(self.source_embed(source)))
        return self.logits(self.decoder(encoded, self.target_embed(target)))


class _Decoder(mx.gluon.HybridBlock):
    """Two LSTM cells, unrolled, that attend to the encoded source and feed their output back."""

    def __init__(self, length: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._length = length
        with self.name_scope():
            self.source = _dense(ATTENTION_ELEMS, "att_e2h_", bias=False)
            self.query = _dense(ATTENTION_ELEMS, "att_q2h_", bias=False)
            self.score = _dense(1, "att_h2s_", bias=False)
            # Each of the cells' states starts from the encoder's last output.
            self.initial = [
                _dense(HIDDEN_ELEMS, f"enc2decinit_{state}_", activation="tanh")
                for state in range(4)
            ]
            for state in self.initial:
                self.register_child(state)
            self.lower = rnn.LSTMCell(
                HIDDEN_ELEMS, input_size=EMBED_ELEMS + HIDDEN_ELEMS, prefix="l0_"
            )
            self.upper = rnn.LSTMCell(HIDDEN_ELEMS, input_size=HIDDEN_ELEMS, prefix="l1_")
            self.hidden = _dense(HIDDEN_ELEMS, "hidden_", activation="tanh")

    def hybrid_forward(self, F: Any, encoded: Any, words: Any) -> Any:
        keys = self.source(encoded)
        last = F.squeeze(F.slice_axis(encoded, axis=1, begin=-1, end=None), axis=1)
        states = [initial(last) for initial in self.initial]
        hidden = F.zeros_like(last)
        steps = []
        for word in F.split(words, self._length, axis=1, squeeze_axis=True):
            lower, states[:2] = self.lower(F.concat(hidden, word, dim=1), states[:2])
            upper, states[2:] = self.upper(lower, states[2:])
            query = F.expand_dims(self.query(upper), axis=1)
            scores = self.score(F.tanh(F.broadcast_add(keys, query)))
            weights = F.softmax(scores, axis=1)
            context = F.squeeze(F.batch_dot(weights, encoded, transpose_a=True), axis=1)
            hidden = self.hidden(F.concat(upper, context, dim=1))
            steps.append(F.expand_dims(hidden, axis=1))
        return F.concat(*steps, dim=1)


def _dense(
    outputs: int, prefix: str, bias: bool = True, activation: Optional[str] = None
) -> nn.Dense:
    return nn.Dense(outputs, activation=activation, use_bias=bias, flatten=False, prefix=prefix)
