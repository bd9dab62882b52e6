"""Exact bytes of the bundled runtime, derived from what it allocates and when.

`replay` repeats the operations of a layer on names of sizes (`layers`, `attention`, `ring`, `latent`,
`experts`, `recomputing`), which gives a tape of what they allocate and free (`tapes`); `sizes` and `groups`
evaluate tapes for many layouts at once (`units`, `states`, `optimizer_state`); `accumulation` and
`pipeline_steps` add up what is alive at the moments of a step that can be the highest (`moments`), and
`schedule_steps` where ranks have several stages: `pass_states` tells what is there before each pass, and
`split_tapes` what a split backward keeps.

Compiled layers have graphs of their own: `compiled_layers`, `compiled_attention` and `compiled_latent` give
what AOTAutograd traces (`compiled_graph`), `compiled_memory` when its tensors have memory, and
`compiled_segments` puts compiled functions among other operations.
"""

from costmodels.bundled.rank_memory import covers, moments_of_ranks, peak_bytes, rank_peaks
from costmodels.bundled.replay import KINDS
from costmodels.bundled.stage_memory import stage_memory

__all__ = ["KINDS", "covers", "moments_of_ranks", "peak_bytes", "rank_peaks", "stage_memory"]
