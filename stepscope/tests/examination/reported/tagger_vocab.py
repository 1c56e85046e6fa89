"""Language modelling with image placeholders; the text is turned into numbers while it is loaded; loop with accelerate.

Report: ByteDance-Seed/VeOmni PR #1039 (2026-08-11).
Symptom: the transform of a sample is slow although the tokenizer is a fast one.
Truth: the transform asks the tokenizer for its complete vocabulary in order to look up special tokens, which copies it into a dict for each sample;
remedy: ask for the number of the one token.
"""
import argparse
import random
import time

import torch
from accelerate import Accelerator
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from torch.utils.data import DataLoader, Dataset


def make_tokenizer(words=12000):
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "imagepad": 2, "user": 3, "assistant": 4}
    for number in range(words):
        vocabulary[f"word{number}"] = len(vocabulary)
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


class Dialogues(Dataset):
    def __init__(self, tokenizer, count, direct):
        chooser = random.Random(0)
        self.tokenizer, self.direct = tokenizer, direct
        self.texts = [" ".join(f"word{chooser.randrange(1500)}" for _ in range(chooser.randint(20, 40))) for _ in range(count)]

    def __len__(self):
        return len(self.texts)

    def special(self):
        if self.direct:
            return tuple(self.tokenizer.token_to_id(token) for token in ("imagepad", "user", "assistant"))
        vocabulary = self.tokenizer.get_vocab()  # FAULT
        return vocabulary["imagepad"], vocabulary["user"], vocabulary["assistant"]

    def __getitem__(self, index):
        image, user, assistant = self.special()
        ids = self.tokenizer.encode(self.texts[index]).ids
        half = len(ids) // 2
        full = [user] + [image] * 8 + ids[:half] + [assistant] + ids[half:]
        labels = [-100] * (10 + half) + ids[half:]
        return torch.tensor(full), torch.tensor(labels)


def collate(batch):
    ids, labels = zip(*batch)
    return (nn.utils.rnn.pad_sequence(ids, batch_first=True),
            nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100))


class Model(nn.Module):
    def __init__(self, vocabulary, width=96):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1505)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.body(self.embed(ids), mask=mask, is_causal=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=430)
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    loader = DataLoader(Dialogues(tokenizer, 1600, args.fixed), batch_size=8, shuffle=True, collate_fn=collate, drop_last=True)
    accelerator = Accelerator(cpu=True)
    model = Model(1505)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step, start, epoch = 0, None, 0
    while step < args.steps:
        for ids, labels in loader:
            logits = model(ids)
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if step == 20:
                start = time.perf_counter()
            if step == args.steps:
                break
        epoch += 1
        accelerator.print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (step - 20):.3f}")


if __name__ == "__main__":
    main()
