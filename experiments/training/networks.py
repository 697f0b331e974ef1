"""The networks that are trained: a residual one for images, a recurrent one for text."""

from __future__ import annotations

from typing import Any

from mxnet.gluon import contrib, nn, rnn

_CHANNELS = (16, 32, 64)


class _Block(nn.HybridBlock):
    """Two convolutions and a way around them."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        with self.name_scope():
            self.body = nn.HybridSequential()
            self.body.add(
                *_convolution(channels, 3, stride),
                nn.Activation("relu"),
                *_convolution(channels, 3),
            )
            self.around = nn.HybridSequential()
            if stride > 1:
                self.around.add(*_convolution(channels, 1, stride))

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        return F.relu(self.body(x) + self.around(x))


def residual_network(blocks: int, classes: int) -> nn.HybridBlock:
    """He et al.'s network for small images (CVPR'16, section 4.2) with 6 `blocks` + 2 layers.

    Its first convolution already halves the image, which theirs does not: a quarter of the work.
    """
    network = nn.HybridSequential()
    network.add(*_convolution(_CHANNELS[0], 3, 2), nn.Activation("relu"))
    for stage, channels in enumerate(_CHANNELS):
        for block in range(blocks):
            network.add(_Block(channels, 2 if stage and not block else 1))
    network.add(nn.GlobalAvgPool2D(), nn.Dense(classes))
    return network


class CharacterModel(nn.HybridBlock):
    """Guesses each next character: (batch, length) characters in, scores of all characters out."""

    def __init__(self, characters: int, embedding: int, hidden: int) -> None:
        super().__init__()
        with self.name_scope():
            self.embedding = nn.Embedding(characters, embedding)
            self.recurrent = rnn.LSTM(hidden, layout="NTC", input_size=embedding)
            self.scores = nn.Dense(characters, flatten=False, in_units=hidden)

    def hybrid_forward(self, F: Any, characters: Any) -> Any:
        return self.scores(self.recurrent(self.embedding(characters)))


class WordModel(nn.Block):
    """Guesses each next word: (batch, length) words in, scores of all words out. Its embedding is a
    table of rows, of which a worker has those of its batch."""

    def __init__(self, words: int, embedding: int, hidden: int) -> None:
        super().__init__()
        with self.name_scope():
            self.embedding = contrib.nn.SparseEmbedding(words, embedding)
            self.recurrent = rnn.LSTM(hidden, layout="NTC", input_size=embedding)
            self.scores = nn.Dense(words, flatten=False, in_units=hidden)

    def forward(self, words: Any) -> Any:
        return self.scores(self.recurrent(self.embedding(words)))


def _convolution(channels: int, size: int, stride: int = 1) -> tuple[nn.HybridBlock, ...]:
    """A convolution that keeps the size of images but for its stride, and its normalisation."""
    return nn.Conv2D(channels, size, stride, size // 2, use_bias=False), nn.BatchNorm()
