"""Hugging Face's accelerate: accumulation, clipping, a schedule, metrics of all ranks; states are
saved, and loaded some steps later."""

import json
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from sizes import sized
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, SIZE, BATCH, WIDTH, CLASSES = 5, 200, 8, sized(16, 512), sized(4, 512)


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    rank = accelerator.process_index
    set_seed(3)
    x = torch.randn(SIZE, WIDTH)
    data = TensorDataset(x, x[:, :CLASSES].argmax(1))
    model = nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH, bias=False),
        nn.BatchNorm1d(2 * WIDTH),
        nn.Dropout(0.1),
        nn.ReLU(),
        nn.Linear(2 * WIDTH, CLASSES),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    model, optimizer, schedule, batches, tests = accelerator.prepare(
        model, optimizer, schedule, DataLoader(data, BATCH, shuffle=True), DataLoader(data, BATCH)
    )
    folders = [tempfile.mkdtemp() if accelerator.is_main_process else None]
    broadcast_object_list(folders)
    step = 0
    for epoch in range(EPOCHS):
        model.train()
        for a, b in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(a), b)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            print(json.dumps({"rank": rank, "step": step, "loss": loss.item()}), flush=True)
            step += 1
        model.eval()
        right = []
        with torch.no_grad():
            for a, b in tests:
                given, wanted = accelerator.gather_for_metrics((model(a).argmax(1), b))
                right.append(given == wanted)
        told = {"rank": rank, "step": step - 1, "right": torch.cat(right).float().mean().item()}
        print(json.dumps(told), flush=True)
        if epoch == 1:
            accelerator.save_state(folders[0])
        if epoch == 3:
            accelerator.load_state(folders[0])
    accelerator.end_training()


if __name__ == "__main__":
    main()
