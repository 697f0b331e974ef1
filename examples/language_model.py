"""A language model whose embedding has sparse gradients: only rows of words that occur travel.

p3kv launch -n 2 -- python examples/language_model.py
"""

import p3kv  # noqa: F401  # First: in a server's role a script goes no further than this line.

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

WORDS, EMBEDDING, HIDDEN = 5000, 64, 32
LENGTH, BATCH, STEPS = 20, 16, 60


class LanguageModel(nn.Block):
    """Guesses each next word of sentences: (length, batch) words in, scores of all words out."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            # A sparse gradient has rows for the words of the batch, and only these travel.
            self.embedding = nn.Embedding(WORDS, EMBEDDING, sparse_grad=True)
            self.lstm = rnn.LSTM(HIDDEN, input_size=EMBEDDING)
            self.scores = nn.Dense(WORDS, flatten=False, in_units=HIDDEN)

    def forward(self, words):
        return self.scores(self.lstm(self.embedding(words)))


def sentences(random):
    """A batch of sentences, (length + 1, batch): in most, word w is followed by 7 w + 1."""
    words = [random.zipf(1.5, size=BATCH) % WORDS]
    for _ in range(LENGTH):
        follows = (7 * words[-1] + 1) % 100
        other = random.zipf(1.5, size=BATCH) % WORDS
        words.append(np.where(random.uniform(size=BATCH) < 0.9, follows, other))
    return mx.nd.array(np.stack(words))


store = mx.kv.create("p3")
random = np.random.RandomState(store.rank)  # each worker reads other sentences
mx.random.seed(1)  # all begin with the same weights
model = LanguageModel()
model.initialize(mx.init.Xavier())
loss_of = gluon.loss.SoftmaxCrossEntropyLoss(batch_axis=1)
trainer = gluon.Trainer(model.collect_params(), "adam", {"learning_rate": 0.01}, kvstore=store)

losses = []
for step in range(1, STEPS + 1):
    text = sentences(random)
    with autograd.record():
        loss = loss_of(model(text[:-1]), text[1:])
    loss.backward()
    trainer.step(BATCH * store.num_workers)
    losses.append(loss.mean())
    if step % 20 == 0:
        perplexity = float(mx.nd.stack(*losses).mean().exp().asscalar())
        losses = []
        print(f"step {step}: perplexity {perplexity:.1f}")

if store.rank == 0:
    sent = store.stats().get("bytes_sent", 0)  # nothing without a launcher
    dense = STEPS * 4 * sum(np.prod(p.shape) for p in model.collect_params().values())
    print(f"sent {sent / 1e6:.1f} MB; with dense gradients it would be {dense / 1e6:.1f} MB")
