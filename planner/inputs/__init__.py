"""What callers write for a model, a cluster, a batch or a degree, and what it stands for."""
