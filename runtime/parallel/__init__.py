"""Execution of a layout: meshes, splits over ranks, pipelines, recomputation, offloading."""
