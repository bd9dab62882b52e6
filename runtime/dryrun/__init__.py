"""The runtime's own training step without memory and without other ranks, to find the bytes of every tensor.

The trainer, the model, FSDP2, the pipeline schedules and the optimizers are the real ones. Tensors are fake
(`torch._subclasses.FakeTensorMode`) and other ranks do not exist (PyTorch's process group "fake"), so any
rank of any world size runs on any machine.
"""
