"""Text from a trained model: `Generator` of `runtime.generation.generator`, and the command's parts."""
