"""A network of two layers in NumPy, trained by two workers.

    cd examples/numpy_front_end
    P3KV_PLUGINS=front_end p3kv launch -n 2 -- python train.py

Its forward pass waits for one weight after the other, while later ones are on their way.
"""

from __future__ import annotations

import p3kv  # noqa: F401  # First: in a server's role a script goes no further than this line.

# isort: split
import numpy as np
from front_end import Trainer

BATCH, STEPS = 32, 100

first = np.random.default_rng(1)
weights = {
    "hidden": first.normal(0, 0.3, (10, 64)).astype(np.float32),
    "output": first.normal(0, 0.1, (64, 1)).astype(np.float32),
}
truth = first.normal(size=(10, 1)).astype(np.float32)
trainer = Trainer(weights, rate=0.05, momentum=0.9)
samples = np.random.default_rng(100 + trainer.rank)
for step in range(1, STEPS + 1):
    x = samples.normal(size=(BATCH, 10)).astype(np.float32)
    y = x @ truth
    if step <= trainer.resumed_steps:
        continue  # the batches that the job has trained with before its checkpoint
    if step == STEPS // 2:
        trainer.optimizer.rate = 0.01
    hidden = np.tanh(x @ trainer.value("hidden"))
    error = hidden @ trainer.value("output") - y
    trainer.push("output", hidden.T @ error / BATCH)
    back = error @ weights["output"].T * (1 - hidden**2)
    trainer.push("hidden", x.T @ back / BATCH)
    trainer.step()
    if step % 25 == 0 and trainer.rank == 0:
        print(f"step {step}: loss {float((error**2).mean()):.4f}", flush=True)
trainer.wait()
