"""Speech: a recurrent network with the CTC loss on batches of like lengths, which differ between
steps and ranks; a rate that follows the inverse square root."""

import json

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

STEPS, BATCH, BANDS, LETTERS, WIDTH = 50, 4, 8, 10, sized(24, 256)


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.reduce = nn.Conv1d(BANDS, WIDTH, 3, padding=1)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * WIDTH, LETTERS)

    def forward(self, x, lengths):
        x = torch.relu(self.reduce(x.transpose(1, 2))).transpose(1, 2)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        x, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(x).log_softmax(-1).transpose(0, 1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(Listener())
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.02 * min((step + 1) ** -0.5, (step + 1) * 10**-1.5)
    )
    criterion = nn.CTCLoss(zero_infinity=True)
    for step in range(STEPS):
        longest = 8 + torch.randint(12, ()).item()
        lengths = longest - torch.randint(3, (BATCH,))
        lengths[0] = longest
        targets = torch.randint(1, LETTERS, (BATCH, 3))
        x = torch.randn(BATCH, longest, BANDS) + targets.float().mean(1)[:, None, None] / 5
        found = model(x, lengths)
        loss = criterion(found, targets, lengths, torch.full((BATCH,), 3))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        print(json.dumps({"rank": rank, "step": step, "loss": loss.item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
