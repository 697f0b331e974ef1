"""A language model in PyTorch: a small transformer learns sentences by characters.

    p3kv launch -n 2 -- python examples/torch_language_model.py

Only the optimizer is p3kv's: the model is not wrapped, and the loop stays as it is.
"""

import p3kv.torch  # First: in a server's role a script goes no further than this line.

# isort: split
import random

import torch
from torch import nn

CONTEXT, WIDTH, BATCH, STEPS = 32, 64, 16, 150
WHO, DOES, WHAT = ["a dog", "the cat", "my bird"], ("sees", "likes"), ["a tree", "the sea"]

draw = random.Random(0)  # all workers draw the same text
sentences = [" ".join(map(draw.choice, (WHO, DOES, WHAT))) for _ in range(500)]
text = ". ".join(sentences)
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(len(letters), WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            block, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )
        self.out = nn.Linear(WIDTH, len(letters), bias=False)
        self.out.weight = self.letters.weight  # tied

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.letters(x) + self.places.weight[: x.shape[1]]
        return self.out(self.blocks(x, mask=mask, is_causal=True))


model = Model()  # worker 0's weights are everybody's
for embedding in (model.letters, model.places):
    nn.init.normal_(embedding.weight, std=0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
p3kv.torch.Optimizer(model, optimizer)  # from here on its updates are the servers'
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=STEPS)

torch.manual_seed(1 + optimizer.rank)  # from here on each worker draws other samples
for step in range(1, STEPS + 1):
    begins = torch.randint(len(data) - CONTEXT - 1, (BATCH,))
    x = torch.stack([data[begin : begin + CONTEXT] for begin in begins])
    y = torch.stack([data[begin + 1 : begin + CONTEXT + 1] for begin in begins])
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()  # each gradient leaves as soon as it is computed
    optimizer.step()  # returns at once
    schedule.step()
    if step % 50 == 0 and optimizer.rank == 0:
        print(f"step {step}: loss {loss.item():.3f}")
