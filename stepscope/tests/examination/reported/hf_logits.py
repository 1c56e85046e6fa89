"""Masked language modelling with the Trainer, evaluated every so many steps by the share of right words.

Report: huggingface/transformers #15466 (2022-02-01), #12878 (2021-07-25), PR #15473 (2022-02-02).
Symptom: the evaluation needs far more time and memory than its forward passes.
Truth: with `compute_metrics` the logits of all words of the vocabulary are gathered for the whole evaluation set; remedy: reduce them by argmax in `preprocess_logits_for_metrics`.
"""
import argparse
import time

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments


class Masked(Dataset):
    def __init__(self, count, length, words, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(5, words, (count, length), generator=generator)
        hidden = torch.rand(count, length, generator=generator) < 0.15
        self.ids = self.labels.masked_fill(hidden, 4)
        self.labels = self.labels.masked_fill(~hidden, -100)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class Clock(TrainerCallback):
    start = None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 20:
            self.start = time.perf_counter()


def accuracy(predictions):
    guesses, labels = predictions
    if guesses.ndim == 3:
        guesses = np.argmax(guesses, axis=-1)
    known = labels != -100
    return {"accuracy": float((guesses == labels)[known].mean())}


def only_best(logits, labels):
    return logits.argmax(-1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=180)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = BertConfig(vocab_size=6000, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
                        max_position_embeddings=64)
    model = BertForMaskedLM(config)
    clock = Clock()
    arguments = TrainingArguments(
        output_dir="case-data/hf_logits", per_device_train_batch_size=8, per_device_eval_batch_size=8, max_steps=options.steps,
        eval_strategy="steps", eval_steps=40, logging_steps=25, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=0)
    trainer = Trainer(model=model, args=arguments, train_dataset=Masked(1600, 48, 6000, 1), eval_dataset=Masked(320, 48, 6000, 2),
                      compute_metrics=accuracy,  # FAULT
                      preprocess_logits_for_metrics=only_best if options.fixed else None, callbacks=[clock])  # FAULT
    trainer.train()
    print(f"step_ms={1e3 * (time.perf_counter() - clock.start) / (options.steps - 20):.3f}")


if __name__ == "__main__":
    main()
