"""A convolutional GAN on drawn images.

Report: pytorch/examples #116 (2017-03-20); batsa003/videogan PR #1 (2018-01-03).
Symptom: the discriminator's part of the step takes longer than its size lets expect.
Truth: the fake images are not detached, so its backward pass goes through the generator as well and those gradients are thrown away; remedy: detach.
"""
import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Generator(nn.Module):
    def __init__(self, noise=64, width=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.ConvTranspose2d(noise, width * 4, 4, 1, 0, bias=False), nn.BatchNorm2d(width * 4), nn.ReLU(True),
            nn.ConvTranspose2d(width * 4, width * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(width * 2), nn.ReLU(True),
            nn.ConvTranspose2d(width * 2, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True),
            nn.Conv2d(width, width * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(width * 2), nn.LeakyReLU(0.2, True),
            nn.Conv2d(width * 2, width * 4, 4, 2, 1, bias=False), nn.BatchNorm2d(width * 4), nn.LeakyReLU(0.2, True),
            nn.Conv2d(width * 4, 1, 4, 1, 0, bias=False), nn.Flatten(0))

    def forward(self, x):
        return self.net(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=440)
    parser.add_argument("--n-critic", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.rand(2048, 3, 32, 32) * 2 - 1), batch_size=32, shuffle=True, drop_last=True)
    net_g, net_d = Generator(), Discriminator()
    opt_g = torch.optim.RMSprop(net_g.parameters(), lr=5e-5)
    opt_d = torch.optim.RMSprop(net_d.parameters(), lr=5e-5)
    step, start, epoch = 0, None, 0
    while step < args.steps:
        for (real,) in loader:
            fake = net_g(torch.randn(len(real), 64, 1, 1))  # FAULT
            if args.fixed:
                fake = fake.detach()
            loss_d = net_d(fake).mean() - net_d(real).mean()  # FAULT
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
            for parameter in net_d.parameters():
                parameter.data.clamp_(-0.01, 0.01)
            step += 1
            if step % args.n_critic == 0:
                loss_g = -net_d(net_g(torch.randn(len(real), 64, 1, 1))).mean()
                opt_g.zero_grad()
                loss_g.backward()
                opt_g.step()
            if step == 20:
                start = time.perf_counter()
            if step == args.steps:
                break
        epoch += 1
        print(f"[Epoch {epoch}] [D loss: {loss_d.item():.4f}] [G loss: {loss_g.item():.4f}]", flush=True)
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (step - 20):.3f}")


if __name__ == "__main__":
    main()
