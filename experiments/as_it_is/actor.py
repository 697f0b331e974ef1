"""Reinforcement learning by PPO: rollouts without gradients, several epochs of mini-batches, three
losses of one model, clipped steps, an early stop that all ranks agree on. As CleanRL's."""

import json

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP

UPDATES, EPOCHS, PARTS, ENVIRONMENTS, LENGTH = 7, 2, 4, 8, 16
SEEN, WIDTH = sized(4, 512), sized(32, 1024)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(SEEN, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.actor = nn.Sequential(nn.Linear(SEEN, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))

    def forward(self, seen, action=None):
        chances = Categorical(logits=self.actor(seen))
        if action is None:
            action = chances.sample()
        return action, chances.log_prob(action), chances.entropy(), self.critic(seen)[:, 0]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    agent = DDP(Agent())
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    torch.manual_seed(100 + rank)
    seen, step = torch.randn(ENVIRONMENTS, SEEN), 0
    for update in range(UPDATES):
        optimizer.param_groups[0]["lr"] = (1 - update / UPDATES) * 2.5e-3
        steps = []
        for _ in range(LENGTH):
            with torch.no_grad():
                action, chance, _, value = agent(seen)
            reward = -(seen[:, 0] + action - 1).abs()
            steps.append((seen, action, chance, value, reward))
            seen = 0.9 * seen + 0.3 * torch.randn_like(seen) + 0.1 * (action[:, None] - 1)
        states, actions, chances, values, rewards = (torch.cat(one) for one in zip(*steps))
        advantages = rewards - values
        for _ in range(EPOCHS):
            for at in torch.randperm(len(states)).chunk(PARTS):
                _, new, entropy, value = agent(states[at], actions[at])
                ratio = (new - chances[at]).exp()
                mine = advantages[at]
                mine = (mine - mine.mean()) / (mine.std() + 1e-8)
                policy = torch.max(-mine * ratio, -mine * ratio.clamp(0.8, 1.2)).mean()
                loss = policy - 0.01 * entropy.mean() + 0.25 * (value - rewards[at]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                print(json.dumps({"rank": rank, "step": step, "loss": loss.item()}), flush=True)
                step += 1
            change = (chances[at] - new.detach()).mean()
            dist.all_reduce(change)
            if change / world > 0.5:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
