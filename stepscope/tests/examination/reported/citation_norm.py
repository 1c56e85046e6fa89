"""Node classification on one citation-like graph, all nodes in each step.

Report: snap-stanford/ogb #157 (2021-04-14) and #130 (2021-03-25); VITA-Group/Deep_GCN_Benchmarking #2 (2021-10-29).
Symptom: each epoch takes longer than the products with the adjacency matrix.
Truth: self loops are added and the edge weights are normalized in each layer and each forward pass although the graph is fixed; remedy: compute them once and keep them.
"""
import argparse
import time

import torch
from torch import nn


def normalize(edges, nodes):
    loops = torch.arange(nodes)
    keep = edges[0] != edges[1]
    row, column = torch.cat([edges[0][keep], loops]), torch.cat([edges[1][keep], loops])
    degree = torch.zeros(nodes).scatter_add_(0, column, torch.ones(len(column)))
    root = degree.pow(-0.5)
    weight = root[row] * root[column]
    return torch.sparse_coo_tensor(torch.stack([column, row]), weight, (nodes, nodes)).coalesce().to_sparse_csr()


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs, cached):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.cached, self.kept = cached, None

    def forward(self, x, edges):
        adjacency = self.kept
        if adjacency is None:
            adjacency = normalize(edges, len(x))  # FAULT
            if self.cached:
                self.kept = adjacency
        return adjacency @ self.linear(x) + self.bias


class Gcn(nn.Module):
    def __init__(self, features, hidden, classes, cached):
        super().__init__()
        self.first = GraphConv(features, hidden, cached)
        self.second = GraphConv(hidden, hidden, cached)
        self.third = GraphConv(hidden, classes, cached)

    def forward(self, x, edges):
        x = nn.functional.dropout(torch.relu(self.first(x, edges)), 0.5, self.training)
        x = nn.functional.dropout(torch.relu(self.second(x, edges)), 0.5, self.training)
        return self.third(x, edges)


def train(model, optimizer, x, edges, y, mask):
    model.train()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x, edges)[mask], y[mask])
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model, x, edges, y, mask):
    model.eval()
    return (model(x, edges).argmax(1)[mask] == y[mask]).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="cached=True")
    parser.add_argument("--steps", type=int, default=360)
    parser.add_argument("--hidden", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(0)
    nodes = 6000
    edges = torch.randint(0, nodes, (2, 24000))
    edges = torch.cat([edges, edges.flip(0)], 1)
    x, y = torch.randn(nodes, 128), torch.randint(0, 7, (nodes,))
    split = torch.rand(nodes)
    model = Gcn(128, args.hidden, 7, args.fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    start = None
    for epoch in range(1, args.steps + 1):
        loss = train(model, optimizer, x, edges, y, split < 0.6)
        if epoch % 25 == 0:
            accuracy = test(model, x, edges, y, split > 0.8)
            print(f"Epoch: {epoch:03d}, Loss: {loss:.4f}, Val: {accuracy:.4f}", flush=True)
        if epoch == 20:
            start = time.perf_counter()
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (args.steps - 20):.3f}")


if __name__ == "__main__":
    main()
