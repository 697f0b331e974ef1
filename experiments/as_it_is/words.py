"""A language model of two LSTM layers: states that go on from batch to batch, tied weights, clipped
steps, a rate that falls when the validation gets no better. As PyTorch's word_language_model."""

import json

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

VOCABULARY, WIDTH, LENGTH, BATCH, EPOCHS = 50, sized(32, 256), 10, 4, 2


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.encoder = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.1)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, words, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(words)), hidden)
        return self.decoder(self.drop(output)).view(-1, VOCABULARY), hidden


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1111)
    words = torch.randint(0, 3, (world * BATCH * (25 * LENGTH + 1),)).cumsum(0) % VOCABULARY
    mine = words.view(world, BATCH, -1)[rank].t().contiguous()
    model = DDP(RNNModel())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    best, step = None, 0
    for _ in range(EPOCHS):
        model.train()
        hidden = tuple(torch.zeros(2, BATCH, WIDTH) for _ in range(2))
        for at in range(0, len(mine) - 1, LENGTH):
            hidden = tuple(one.detach() for one in hidden)
            model.zero_grad()
            output, hidden = model(mine[at : at + LENGTH], hidden)
            loss = criterion(output, mine[at + 1 : at + 1 + LENGTH].reshape(-1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            print(json.dumps({"rank": rank, "step": step, "loss": loss.item()}), flush=True)
            step += 1
        model.eval()
        with torch.no_grad():
            validation = criterion(model(mine[:LENGTH], None)[0], mine[1 : 1 + LENGTH].reshape(-1))
        dist.all_reduce(validation)
        if best is None or validation < best:
            best = validation
        else:
            for group in optimizer.param_groups:
                group["lr"] /= 4.0
    if rank == 0:
        assert "module.encoder.weight" in model.state_dict()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
