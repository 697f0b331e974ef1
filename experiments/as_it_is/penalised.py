"""A Wasserstein GAN with a penalty of the critic's gradients: three steps of the critic's for each
of the generator's, and second derivatives."""

import json

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, CRITICS, BATCH, NOISE = 50, 3, 16, 4
WIDTH, POINT = sized(32, 1024), sized(2, 256)


def penalty(critic, real, fake):
    share = torch.rand(len(real), 1)
    between = (share * real + (1 - share) * fake).requires_grad_(True)
    (slopes,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((slopes.norm(2, dim=1) - 1) ** 2).mean()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    generator = DDP(nn.Sequential(nn.Linear(NOISE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, POINT)))
    critic = DDP(nn.Sequential(nn.Linear(POINT, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1)))
    of_generator = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.0, 0.9))
    of_critic = torch.optim.Adam(critic.parameters(), 1e-3, betas=(0.0, 0.9))
    for step in range(STEPS):
        real = torch.randn(BATCH, POINT) * torch.tensor([1.0, 0.2]).repeat(POINT // 2) + 1
        fake = generator(torch.randn(BATCH, NOISE)).detach()
        of_critic.zero_grad()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty(critic, real, fake)
        loss.backward()
        of_critic.step()
        print(json.dumps({"rank": rank, "step": step, "loss": loss.item()}), flush=True)
        if step % CRITICS == CRITICS - 1:
            of_generator.zero_grad()
            loss = -critic(generator(torch.randn(BATCH, NOISE))).mean()
            loss.backward()
            of_generator.step()
            print(json.dumps({"rank": rank, "step": step, "generator": loss.item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
