"""A generative adversarial network: two models, two optimizers, two backward passes of the critic's
and one of the generator's, which goes through the critic. As PyTorch's DCGAN example."""

import json
import os

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, BATCH, NOISE, WIDTH = 50, 8, sized(8, 64), sized(16, 512)

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
generator = DDP(
    nn.Sequential(
        nn.ConvTranspose2d(NOISE, WIDTH, 4), nn.BatchNorm2d(WIDTH), nn.ReLU(),
        nn.ConvTranspose2d(WIDTH, 3, 4, 2, 1), nn.Tanh(),
    ),
)  # fmt: skip
critic = DDP(
    nn.Sequential(
        nn.Conv2d(3, WIDTH, 4, 2, 1), nn.BatchNorm2d(WIDTH), nn.LeakyReLU(0.2),
        nn.Conv2d(WIDTH, 1, 4),
    ),
    broadcast_buffers=False,
)  # fmt: skip
criterion = nn.BCEWithLogitsLoss()
critic_optimizer = optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
generator_optimizer = optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
for step in range(STEPS):
    critic.zero_grad()
    real = torch.randn(BATCH, 3, 8, 8).tanh() + 0.2
    real_loss = criterion(critic(real).view(-1), torch.ones(BATCH))
    real_loss.backward()
    fake = generator(torch.randn(BATCH, NOISE, 1, 1))
    fake_loss = criterion(critic(fake.detach()).view(-1), torch.zeros(BATCH))
    fake_loss.backward()
    critic_optimizer.step()
    generator.zero_grad()
    loss = criterion(critic(fake).view(-1), torch.ones(BATCH))
    loss.backward()
    generator_optimizer.step()
    critic_loss = (real_loss + fake_loss).item()
    print(
        json.dumps({"rank": rank, "step": step, "loss": loss.item(), "critic": critic_loss}),
        flush=True,
    )
dist.destroy_process_group()
