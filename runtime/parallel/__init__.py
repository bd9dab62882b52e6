"""What a layout does to the model: meshes, splits over ranks, pipelines, recomputation, offloading."""
