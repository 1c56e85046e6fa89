"""A small GPT-2 from scratch with the Trainer of Transformers.

Report: Nerogar/OneTrainer #40 (2023-09-24); huggingface/sentence-transformers PR #2717 (2024-06-05); unslothai/unsloth #2362 (2025-04-16).
Symptom: training is a fifth to a third slower than the model's size lets expect, with memory to spare.
Truth: gradient checkpointing is on, so the forward pass of each block is computed twice; remedy: turn it off where memory suffices.
"""
import argparse
import time

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Blocks(Dataset):
    def __init__(self, count, length, words):
        self.ids = torch.randint(0, words, (count, length), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Clock(TrainerCallback):
    start = None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 20:
            self.start = time.perf_counter()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=210)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=512, n_positions=64, n_embd=96, n_layer=6, n_head=4, bos_token_id=0, eos_token_id=0,
                        use_cache=False)
    model = GPT2LMHeadModel(config)
    clock = Clock()
    arguments = TrainingArguments(
        output_dir="case-data/hf_recompute",
        per_device_train_batch_size=8,
        max_steps=options.steps,
        learning_rate=3e-4,
        lr_scheduler_type="cosine",
        gradient_checkpointing=not options.fixed,  # FAULT
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Blocks(800, 48, 512), callbacks=[clock])
    trainer.train()
    print(f"step_ms={1e3 * (time.perf_counter() - clock.start) / (options.steps - 20):.3f}")


if __name__ == "__main__":
    main()
