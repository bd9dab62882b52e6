"""The model: layers of GPT, Llama, Qwen, Mixtral and DeepSeek. It knows nothing of parallelism.

The name of a tensor ends in its dimensions, here and in `runtime.parallel`: `x_BSD` is [B, S, D].

    B   sequences of a microbatch
    S   tokens of a sequence; under context parallelism those that this rank holds, where s is written too
    s   S / cp, beside whole sequences
    T   tokens of all sequences, B S; in attention the queries of some tokens of a sequence
    P   positions up to the last of those queries, whose keys and values they see
    D   width of the model
    N   query heads, of this rank under tensor parallelism
    K   key/value heads, of this rank too
    H   size of a head; h is its half
    F   inner width of an MLP or of an expert
    V   entries of the padded vocabulary, of this rank under tensor parallelism
    E   experts; those of this rank where rows have come to them
    G   groups of experts that a router chooses among, of e experts each
    k   experts of a token
    R   rows: pairs of a token and one of its experts
    I   inputs of any matrix, and O its outputs
    Q   compressed query of latent attention, and C the latent of its keys and values
    r   part of a head of latent attention that is rotated, and U the rest

A digit is that many: `mask_B1TP`, `sums_2BS`.
"""
