"""Lightning's Trainer: steps of its own, with accumulation, clipping, a schedule, EarlyStopping and
a checkpoint from which a second Trainer resumes; then a GAN by manual_optimization."""

import json
import os
import tempfile

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sizes import sized
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SIZE, BATCH, WIDTH, CLASSES = 200, 8, sized(16, 384), sized(4, 384)
RANK = int(os.environ["RANK"])
steps = 0


def tell(**losses):
    global steps
    told = {name: value.item() for name, value in losses.items()}
    print(json.dumps({"rank": RANK, "step": steps, **told}), flush=True)
    steps += 1


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.BatchNorm1d(2 * WIDTH), nn.ReLU(),
            nn.Linear(2 * WIDTH, CLASSES),
        )  # fmt: skip

    def training_step(self, batch, at):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        tell(loss=loss)
        return loss

    def validation_step(self, batch, at):
        self.log("validated", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Gan(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        hidden = 2 * WIDTH
        self.maker = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, WIDTH))
        self.critic = nn.Sequential(
            nn.Linear(WIDTH, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, 1)
        )

    def training_step(self, batch, at):
        of_maker, of_critic = self.optimizers()
        noise = torch.randn(len(batch[0]), 8)
        self.toggle_optimizer(of_maker)
        loss = F.softplus(-self.critic(self.maker(noise))).mean()
        of_maker.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(of_maker, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        of_maker.step()
        self.untoggle_optimizer(of_maker)
        self.toggle_optimizer(of_critic)
        made = self.maker(noise).detach()
        judged = F.softplus(-self.critic(batch[0])).mean() + F.softplus(self.critic(made)).mean()
        of_critic.zero_grad()
        self.manual_backward(judged)
        of_critic.step()
        self.untoggle_optimizer(of_critic)
        tell(loss=loss, judged=judged)

    def configure_optimizers(self):
        return [torch.optim.Adam(one.parameters(), lr=1e-3) for one in (self.maker, self.critic)]


def trainer(folder, callbacks, strategy="ddp", **more):
    return lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, logger=False, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks, **more,
    )  # fmt: skip


def main():
    lightning.seed_everything(1, verbose=False)
    x = torch.randn(SIZE, WIDTH)
    data = TensorDataset(x, x[:, :CLASSES].argmax(1))
    batches, tests = DataLoader(data, BATCH, shuffle=True), DataLoader(data, BATCH)
    folder = os.environ.get("TORCHELASTIC_RUN_ID") or "lit"  # the same on both ranks
    folder = os.path.join(tempfile.gettempdir(), folder)
    for epochs, resumes in ((2, None), (4, os.path.join(folder, "last.ckpt"))):
        saves = ModelCheckpoint(folder, monitor="validated", save_last=True)
        train = trainer(
            folder, [EarlyStopping("validated", patience=2), saves], max_epochs=epochs,
            accumulate_grad_batches=2, gradient_clip_val=0.5,
        )  # fmt: skip
        train.fit(Classifier(), batches, tests, ckpt_path=resumes)
    adversaries = trainer(
        folder, [], strategy="ddp_find_unused_parameters_true", max_epochs=2,
        enable_checkpointing=False,
    )  # fmt: skip
    adversaries.fit(Gan(), batches)


if __name__ == "__main__":
    main()
