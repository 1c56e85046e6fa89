"""Next-note prediction on piano rolls with a recurrent network that was put together from linear layers.

Report: discuss.pytorch.org/t/why-my-manual-gru-is-slower-than-nn-gru/86461 (2020-06); discuss.pytorch.org/t/how-to-speed-up-for-loop-in-customized-rnn/1012 (2017-03).
Symptom: the own version is painfully slow compared with the built-in layer that computes the same.
Truth: a Python loop over the time steps with many small operations each; remedy: the built-in GRU.
"""
import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ManualGRU(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.hidden = hidden
        self.xz, self.hz = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
        self.xr, self.hr = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
        self.xn, self.hn = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)

    def forward(self, x):
        state = x.new_zeros(len(x), self.hidden)
        outputs = []
        for t in range(x.shape[1]):  # FAULT
            now = x[:, t]
            update = torch.sigmoid(self.xz(now) + self.hz(state))
            reset = torch.sigmoid(self.xr(now) + self.hr(state))
            candidate = torch.tanh(self.xn(now) + reset * self.hn(state))
            state = update * state + (1 - update) * candidate
            outputs.append(state)
        return torch.stack(outputs, 1), state


class Composer(nn.Module):
    def __init__(self, builtin, notes=88, hidden=96):
        super().__init__()
        self.enter = nn.Linear(notes, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True) if builtin else ManualGRU(hidden, hidden)
        self.leave = nn.Linear(hidden, notes)

    def forward(self, rolls):
        return self.leave(self.rnn(torch.relu(self.enter(rolls)))[0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="nn.GRU")
    parser.add_argument("--steps", type=int, default=340)
    args = parser.parse_args()
    torch.manual_seed(0)
    rolls = (torch.rand(960, 49, 88) < 0.05).float()
    loader = DataLoader(TensorDataset(rolls), batch_size=16, shuffle=True)
    model = Composer(args.fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step, start, epoch = 0, None, 0
    while step < args.steps:
        for (batch,) in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch[:, :-1]), batch[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step == 20:
                start = time.perf_counter()
            if step == args.steps:
                break
        epoch += 1
        print(f"Epoch: {epoch}/{args.steps // 60 + 1}............. Loss: {loss.item():.4f}", flush=True)
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (step - 20):.3f}")


if __name__ == "__main__":
    main()
