"""A training loop whose best settings can be found by hand: `loop.py KIND [OPTIONS]` prints the time of a step.

Without options it is as somebody wrote it; an option has a setting changed by hand, as `stepscope try` recommends it.
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Items(Dataset):
    """Items that wait, and items that work, for some ms each."""

    def __init__(self, count, shape, waits_ms=0.0, works_ms=0.0):
        self.rows, self.waits_ms, self.works_ms = torch.randn(count, *shape), waits_ms, works_ms

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        time.sleep(self.waits_ms / 1e3)
        end = time.thread_time() + self.works_ms / 1e3
        while time.thread_time() < end:
            pass
        return self.rows[index], index % 10


def convolutions():
    layers = nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))


def wide():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3072, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )


def narrow():
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))


def deep():
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 32), *[nn.Linear(32, 32) for _ in range(150)], nn.Linear(32, 10))


IMAGES = (3, 32, 32)
USUAL = {"workers": 0, "persistent": False, "threads": None, "fused": False, "bfloat16": False, "channels_last": False}
KINDS = {  # dataset, network, ms of a GPU that the step waits for, and the settings as they are
    "items that wait": (lambda: Items(960, IMAGES, waits_ms=2), narrow, 0, {}),
    "items that work": (lambda: Items(960, IMAGES, works_ms=1), narrow, 20, {}),
    "workers without work": (lambda: Items(20_000, IMAGES), narrow, 0, {"workers": 2}),
    "short epochs": (lambda: Items(128, IMAGES, works_ms=0.5), narrow, 15, {"workers": 2}),
    "anomaly detection": (lambda: Items(960, IMAGES), deep, 0, {"anomaly": True}),
    "one thread": (lambda: Items(960, IMAGES), convolutions, 0, {"threads": 1}),
    "a loop of updates": (lambda: Items(960, IMAGES), deep, 0, {}),
    "wide layers": (lambda: Items(960, IMAGES), wide, 0, {}),
    "items that wait, one thread": (lambda: Items(960, IMAGES, waits_ms=1), convolutions, 0, {"threads": 1}),
    "workers and updates": (lambda: Items(960, IMAGES, works_ms=0.5), deep, 10, {}),
    "healthy: a busy GPU": (lambda: Items(960, IMAGES), narrow, 40, {}),
    "healthy: well fed": (lambda: Items(960, IMAGES, works_ms=0.3), narrow, 40, {"workers": 1, "persistent": True}),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prefetch_factor", type=int)
    parser.add_argument("--multiprocessing_context")
    for name in ("persistent", "fused", "bfloat16", "channels_last", "anomaly", "compile", "in_order"):
        parser.add_argument(f"--{name}", type=lambda text: text == "True")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = vars(parser.parse_args())
    make_items, make_network, gpu_ms, own = KINDS[options["kind"]]
    chosen = USUAL | {"anomaly": False} | own | {name: value for name, value in options.items() if value is not None}

    torch.manual_seed(0)
    if chosen["threads"]:
        torch.set_num_threads(chosen["threads"])
    torch.autograd.set_detect_anomaly(chosen["anomaly"], check_nan=chosen["anomaly"])
    network, items = make_network(), make_items()
    if chosen["channels_last"]:
        network.to(memory_format=torch.channels_last)
    if chosen.get("compile"):
        network.compile()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=chosen["fused"])
    of_workers = {}
    if chosen["workers"]:
        of_workers = {"num_workers": chosen["workers"], "persistent_workers": chosen["persistent"]}
        given = {"prefetch_factor", "multiprocessing_context", "in_order"} & chosen.keys()
        of_workers |= {name: chosen[name] for name in given}
    loader = DataLoader(items, 16, shuffle=True, **of_workers)
    steps, begin, end = 0, 0.0, float("inf")
    while time.perf_counter() < end:  # whole epochs
        for images, labels in loader:
            if chosen["channels_last"]:
                images = images.to(memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16, enabled=chosen["bfloat16"]):
                loss = nn.functional.cross_entropy(network(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(gpu_ms / 1e3)
            steps += 1
        if not begin:  # the first epoch warms up
            begin, steps = time.perf_counter(), 0
            end = begin + options["seconds"]
    print(f"step_ms={(time.perf_counter() - begin) / steps * 1e3:.4f}")


if __name__ == "__main__":
    main()
