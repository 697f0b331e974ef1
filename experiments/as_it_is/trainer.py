"""Hugging Face's Trainer: a small BERT; clipping, accumulation, a schedule, evaluation, the best
checkpoint loaded at the end, and a second Trainer that resumes from the first one's last."""

import json
import os
import tempfile

import torch
from sizes import sized
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

STEPS, BATCH, LENGTH, VOCABULARY, WIDTH = 50, 4, 16, 100, sized(32, 192)
RANK = int(os.environ["RANK"])


class Order(Dataset):
    """Whether the first word's number is larger than the second's."""

    def __init__(self, size, seed):
        random = torch.Generator().manual_seed(seed)
        self.words = torch.randint(VOCABULARY, (size, LENGTH), generator=random)

    def __len__(self):
        return len(self.words)

    def __getitem__(self, at):
        words = self.words[at]
        mask = torch.ones(LENGTH, dtype=torch.long)
        return {"input_ids": words, "attention_mask": mask, "labels": int(words[0] > words[1])}


class Tell(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            told = {"rank": RANK, "step": state.global_step - 1, "loss": float(logs["loss"])}
            print(json.dumps({**told, "norm": float(logs["grad_norm"])}), flush=True)
        if "eval_loss" in logs:
            told = {"rank": RANK, "step": state.global_step - 1, "evaluated": logs["eval_loss"]}
            print(json.dumps(told), flush=True)


def train(folder, steps, resumes):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=2 * WIDTH, max_position_embeddings=LENGTH,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=1e-3,
        gradient_accumulation_steps=2, max_grad_norm=1.0, lr_scheduler_type="cosine",
        warmup_steps=5, logging_steps=1, eval_strategy="steps", eval_steps=10, save_steps=10,
        load_best_model_at_end=True, report_to=[], use_cpu=True, ddp_backend="gloo", seed=1,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model=BertForSequenceClassification(config), args=arguments, train_dataset=Order(333, 0),
        eval_dataset=Order(50, 1), callbacks=[Tell()],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resumes or None)


def main():
    torch.distributed.init_process_group("gloo")
    folders = [tempfile.mkdtemp() if RANK == 0 else None]
    torch.distributed.broadcast_object_list(folders)
    train(folders[0], STEPS // 2, resumes=False)
    train(folders[0], STEPS, resumes=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
