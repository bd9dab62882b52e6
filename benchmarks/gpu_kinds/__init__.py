"""Every kind of job on one GPU: `python -m benchmarks.gpu_kinds`."""
