"""Finds the bottleneck of a PyTorch training loop: times it, reads its profiler traces, and says what to change."""
