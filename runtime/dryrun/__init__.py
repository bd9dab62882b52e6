"""The runtime's own training step without memory and without ranks: what every tensor of it takes.

The trainer, the model, FSDP2, the pipeline schedules and the optimizers are the real ones. Tensors are fake
(`torch._subclasses.FakeTensorMode`) and other ranks do not exist (PyTorch's process group "fake"), so any
rank of any world size runs on any machine.
"""
