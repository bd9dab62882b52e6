"""An explanation of the notation of plans, for people who see a plan for the first time."""

NOTATION = """\
tp=4+sp           4 ranks share each matrix; +sp: norms split the sequence
pp=8 vpp=2        8 pipeline ranks with 2 chunks of the layers each
schedule=zbv      order of passes; 1f1b and interleaved are not written
cp=2 cp_form=ring 2 ranks share each sequence; attention reaches the rest by
                  all_gather, all_to_all (Ulysses) or ring
ep=8 etp=2        experts are spread over 8 places; 2 ranks share each of them
dp=16             16 replicas, each with its part of the batch
zero=1            split over replicas: 0 nothing, 1 optimizer state,
                  2 gradients too, 3 parameters too
zero_replicas=2   2 copies of the states that ZeRO splits (hybrid sharding)
mbs=1 x 8         8 microbatches of 1 sequence in a replica's step: a global
                  batch of dp x 1 x 8
recompute=full    backward computes again: none, selective (core
                  attention, or the modules in brackets), or full layers
full/block:1      only in the first layer of each stage
full/uniform:2    in all layers, and one input of every 2 layers is kept
offload=optimizer kept in host memory: activations, optimizer
layers=9*3+5      layers of each stage, written where they are not as equal as
                  they can be: three stages of 9 layers, and one of 5
= zero 2          the same plan with zero=2 equals it in every estimate"""
