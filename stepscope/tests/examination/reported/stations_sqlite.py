"""Forecasts of weather stations whose measurements lie in an SQLite file.

Report: metno/pyaerocom #1610 (2025-05-02); scottrogowski/mongita #2 (2021-04-20).
Symptom: reading one station's rows takes far too long.
Truth: the column that the query filters by has no index, so each query goes through the table; remedy: create the index.
"""
import argparse
import sqlite3
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

ROOT = Path("case-data/stations_sqlite")
STATIONS, HOURS = 300, 96


def prepare(indexed):
    path = ROOT / ("indexed.db" if indexed else "plain.db")
    if path.exists():
        return path
    ROOT.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    temporary = path.with_suffix(".part")
    temporary.unlink(missing_ok=True)
    connection = sqlite3.connect(temporary)
    connection.execute("CREATE TABLE measurements (station INTEGER, hour INTEGER, temperature REAL, wind REAL, pressure REAL)")  # FAULT
    rows = [(int(station), hour, *map(float, random.normal(size=3))) for hour in range(HOURS) for station in range(STATIONS)]
    connection.executemany("INSERT INTO measurements VALUES (?, ?, ?, ?, ?)", rows)
    if indexed:
        connection.execute("CREATE INDEX by_station ON measurements (station, hour)")
    connection.commit()
    connection.close()
    temporary.rename(path)
    return path


class Windows(Dataset):
    query = "SELECT temperature, wind, pressure FROM measurements WHERE station = ? AND hour >= ? AND hour < ? ORDER BY hour"

    def __init__(self, path, length=48):
        self.path, self.length, self.connection = str(path), length, None

    def __len__(self):
        return STATIONS * 4

    def __getitem__(self, index):
        if self.connection is None:
            self.connection = sqlite3.connect(self.path)
        station, first = index // 4, (index % 4) * 10
        rows = self.connection.execute(self.query, (station, first, first + self.length + 1)).fetchall()  # FAULT
        values = torch.tensor(rows, dtype=torch.float32)
        return values[:-1], values[-1, 0]


class Forecaster(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.rnn = nn.GRU(3, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])[:, 0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="table with an index")
    parser.add_argument("--steps", type=int, default=320)
    args = parser.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(Windows(prepare(args.fixed)), batch_size=32, shuffle=True, drop_last=True,
                        num_workers=1, persistent_workers=True)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step, start, epoch = 0, None, 0
    while step < args.steps:
        losses = []
        for window, target in loader:
            loss = nn.functional.mse_loss(model(window), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            step += 1
            if step == 20:
                start = time.perf_counter()
            if step == args.steps:
                break
        epoch += 1
        print(f"Epoch {epoch}: {np.mean(losses):.4f}", flush=True)
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (step - 20):.3f}")


if __name__ == "__main__":
    main()
