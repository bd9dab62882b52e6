"""Which operations a unit of a model does: the key that chooses its tape."""

from typing import Literal, NamedTuple

from costmodels.layers.shapes import QUERY_BLOCK, experts_are_whole, loss_chunks
from costmodels.spec.hardware import Precision
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import AttentionKind, Router

Unit = Literal["embedding", "dense", "experts", "head"]

LAYERS: tuple[Unit, ...] = ("dense", "experts")

ALIGNED_HEAD = 8
"""Elements that heads are filled up to multiples of for fused attention."""

FLASH_HEAD = 256
"""The largest head that flash attention takes."""

FLOAT8_MULTIPLE = 16
"""What sides of matrices must be multiples of in products in 8 bits (`runtime.parallel.float8`)."""

FEWEST_STEPS = 6
"""Of linear attention that are a loop: its first and last ones are unlike the others."""

REACHES = {"attention=window", "attention=chunk"}
"""Forms of blocks whose tokens do not see all before them."""

GROUPED_MULTIPLE = 8
"""Elements in 16 bits that rows of matrices must be multiples of in PyTorch's grouped product."""


class Structure(NamedTuple):
    """What decides the operations of a unit, all numbers but sides of 1 left out.

    Fields that a kind of unit does not heed have their defaults, so that equal keys mean equal tapes.
    """

    unit: Unit
    precision: str
    """Of those whose tapes are equal, the usual one."""
    compiled: bool = False
    several: bool = False
    """Micro batches of more than one sequence, where that changes operations."""
    tensor_parallel: bool = False
    sequence_parallel: bool = False
    norm: str = ""
    learned_positions: bool = False
    chunks: int = 0
    """Of a head: parts of a micro batch whose logits are there one after the other."""
    pads_vocabulary: bool = False
    """The first rank's part of the vocabulary has rows that no token has."""
    few_steps: int = 0
    """Of linear attention, where they are no loop; 1 where capped scores are those of less than one block."""
    partial_step: bool = False
    """The last step of attention through a sequence has fewer tokens than the others."""
    short_window: bool = False
    """Tokens see less than one of two parts of a rank that gathers keys, where that changes operations."""
    linear_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    rotates: bool = False
    gated: bool = False
    activation: str = ""
    """Only where it does not keep its input alone."""
    grouped_queries: bool = False
    one_head: bool = False
    one_key_head: bool = False
    """A rank has one head of queries, and one of keys, where that changes operations."""
    unaligned_heads: bool = False
    """Fused attention fills heads up."""
    unfused: bool = False
    """The kernel of attention is not the one that takes grouped queries without copies."""
    shares_heads: bool = False
    """Tensor-parallel ranks share key/value heads."""
    latent: bool = False
    latent_queries: bool = False
    longer_heads: str = ""
    """Of latent attention, whose heads are larger: those of "keys" or of "values"."""
    scales_scores: bool = False
    context_form: str = ""
    context_ranks: int = 1
    """Of a ring, in whose rounds operations repeat."""
    repeats_heads: bool = False
    """Context-parallel ranks that exchange heads first repeat those of keys and values."""
    odd_sides: tuple[str, ...] = ()
    """Sides of matrices that products in 8 bits do not take."""
    odd_heads: bool = False
    """The same of matrices with a row for each head of linear attention, which others have not."""
    odd_rows: bool = False
    """The same of the tokens of a rank, which are filled up for gradients of weights."""
    recompute: tuple[str, ...] = ()
    """Modules that backward computes again, in alphabetical order; "full" for the layer."""
    offloads_activations: str = ""
    """What attention keeps is "sent" to host memory, or "kept", as the last layer of the only stage does;
    "beside" is a layer that does neither in a stage of others that do, where that matters."""
    expert_parallel: bool = False
    expert_tensor_parallel: bool = False
    expert_ranks: int = 1
    """Ranks that share one of several ranks' experts: operations repeat for each."""
    loop_of_experts: int = 0
    """Experts of a rank that are computed one after the other; 0 where one kernel computes all."""
    loop_choices: tuple[int, ...] = ()
    """Of such experts, too few to tell sizes by: choices of a token, groups, and groups that are open."""
    whole: bool = False
    """One graph is all of a compiled layer with experts."""
    score: str = ""
    normalised: bool = False
    scaled: bool = False
    expert_bias: bool = False
    group_score: str = ""
    """How groups of experts are chosen; "" without groups."""
    one_choice: bool = False
    limited: str = ""
    """A limited capacity of experts: "full" where even loads fill it, "part" where it drops some."""
    form: tuple[str, ...] = ()
    """What blocks have that few models do, as `block_form` says it."""
    shared_experts: bool = False
    shared_gate: bool = False
    further: int = 0
    """Of a head: modules that predict further tokens, whose layers are what the fields of layers say."""
    further_experts: bool = False
    tied: bool = False
    """Of such a head, whose matrix is the embedding's."""
    fp8_recipe: str = ""
    """Of products in 8 bits, where it is not "rowwise"."""

    @property
    def routes(self) -> bool:
        """Whether it has routed experts."""
        return self.unit == "experts" or self.further_experts

    @property
    def name(self) -> str:
        """The fields that differ from their defaults, as text that can name a file."""
        parts = [self.unit, self.precision]
        for field, value in zip(self._fields[2:], self[2:], strict=True):
            if value == self._field_defaults[field]:
                continue
            text = "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
            parts.append(field if value is True else f"{field}={text}")
        return ",".join(parts)


class UnitKind(NamedTuple):
    """A unit and, of a layer, its attention."""

    unit: Unit
    attention: AttentionKind = "none"


def units_of_stage(model: ModelSpec, layout: Layout, stage: int) -> list[UnitKind]:
    """The units of one stage, in the order of forward."""
    kinds = (model.layer_kind(layer) for layer in layout.layer_range(stage))
    layers = [UnitKind("experts" if kind.mlp == "experts" else "dense", kind.attention) for kind in kinds]
    first = [UnitKind("embedding")] if stage == 0 else []
    last = [UnitKind("head")] if stage == len(layout.layers_per_stage) - 1 else []
    return [*first, *layers, *last]


def structure_of(
    model: ModelSpec,
    layout: Layout,
    unit: Unit,
    compiled: bool,
    recomputes: bool = True,
    is_last: bool = False,
    attention: AttentionKind | None = None,
    query_block: int = QUERY_BLOCK,
) -> Structure:
    """The structure of a unit.

    Args:
        compiled: layers are compiled.
        recomputes: the layer is one of those that recompute what the layout says.
        is_last: the layer, or the last one of a head, is the last one of its stage.
        attention: of the layer; that of the model's first one if None.
        query_block: queries whose capped scores are there at a time.
    """
    if unit in LAYERS:
        model = model.with_attention(attention or model.attention_pattern[0])
    tp = layout.tensor_parallel
    found = Structure(
        unit=unit,
        precision=_equal_precision(layout.precision, unit),
        several=layout.micro_batch_size > 1,
        tensor_parallel=tp > 1,
        sequence_parallel=layout.sequence_parallel,
    )
    if unit == "embedding":
        scaled = ("embedding_scale",) if model.embedding_scale != 1.0 else ()
        found = found._replace(learned_positions=model.position == "learned", form=scaled)
    elif unit == "head":
        entries = model.padded_vocab(tp) // tp
        tokens = layout.micro_batch_size * model.seq // layout.context_parallel
        found = found._replace(
            compiled=compiled,
            norm=model.norm,
            form=_head_form(model),
            pads_vocabulary=entries > model.vocab,
            chunks=int(loss_chunks(tokens, tp)),
        )
        if model.mtp_depths:
            return _with_further(found, model, layout, is_last, query_block)
    else:
        found = _of_layer(found._replace(compiled=compiled), model, layout, recomputes, is_last, query_block)
    return found._replace(
        several=found.several and heeds_rows(found),
        grouped_queries=found.grouped_queries and heeds_groups(found),
        one_head=found.one_head and heeds_one_head(found),
        one_key_head=found.one_key_head and heeds_one_head(found) and not found.latent,
    )


def _with_further(
    head: Structure, model: ModelSpec, layout: Layout, is_last: bool, query_block: int
) -> Structure:
    """The structure of a head and of the modules after it, whose layers are like the last one."""
    kind = model.layer_kind(model.layers - 1)
    unit: Unit = "experts" if kind.mlp == "experts" else "dense"
    layer = structure_of(
        model.model_copy(update={"mtp": None}),
        layout,
        unit,
        head.compiled,
        is_last=is_last,
        attention=kind.attention,
        query_block=query_block,
    )
    scaled = ("embedding_scale",) if model.embedding_scale != 1.0 else ()
    return layer._replace(
        unit="head",
        chunks=head.chunks,
        pads_vocabulary=head.pads_vocabulary,
        form=tuple(dict.fromkeys((*layer.form, *head.form, *scaled))),
        further=model.mtp_depths,
        further_experts=unit == "experts",
        tied=model.tied,
        odd_rows=False,
    )


def _head_form(model: ModelSpec) -> tuple[str, ...]:
    """What few heads have."""
    has = {
        "logits_scale": model.logits_scale != 1.0,
        "logits_softcap": model.logits_softcap > 0,
        "norm_from_one": model.norm_from_one,
    }
    return tuple(name for name, is_there in has.items() if is_there)


def _equal_precision(precision: Precision, unit: Unit) -> Precision:
    """The precision whose tapes are those of this one: elements of equal size, and the same operations.

    What in 16 bits bf16 alone has, grouped products of experts, is told by `loop_of_experts`.
    """
    if precision == "tf32":
        return "fp32"
    return "bf16" if precision == "fp16" or (precision == "fp8" and unit not in LAYERS) else precision


def _kept_operands(activation: str, compiled: bool) -> str:
    """The activation function where what it keeps for backward differs from its input alone: relu2 is two
    operations, of which compiled layers keep what the others do, and the clamped one several."""
    told = activation == "clamped_silu" or (activation == "relu2" and not compiled)
    return activation if told else ""


def heeds_rows(structure: Structure) -> bool:
    """Whether operations differ for micro batches of one sequence; recorded tapes tell."""
    if structure.unit == "embedding":
        return structure.sequence_parallel or structure.learned_positions
    if structure.routes and structure.tensor_parallel:
        # Ranks take their parts of sequences, and join them.
        return True
    if _multiplies_heads(structure):
        return True
    return structure.sequence_parallel or structure.context_form == "all_gather"


def heeds_groups(structure: Structure) -> bool:
    """Whether operations of a layer differ for grouped queries."""
    return _multiplies_heads(structure) or structure.context_form == "all_to_all"


def _multiplies_heads(structure: Structure) -> bool:
    """Whether attention is products of matrices, which copy heads that do not lie as they need them."""
    return structure.unfused or not {"attention=linear", "attention_softcap"}.isdisjoint(structure.form)


def heeds_one_head(structure: Structure) -> bool:
    """Whether operations of a layer differ where a rank has one head, of queries or of keys."""
    return heeds_groups(structure) or structure.context_form == "ring" or structure.latent


def _of_layer(
    common: Structure, model: ModelSpec, layout: Layout, recomputes: bool, is_last: bool, query_block: int
) -> Structure:
    modules = {"none": (), "full": ("full",), "selective": tuple(sorted(layout.recompute_modules))}
    found = common._replace(
        norm=model.norm,
        linear_bias=model.linear_bias,
        rotates=model.turned_by(model.attention_pattern[0]) is not None,
        gated=model.gated,
        activation=_kept_operands(model.activation, common.compiled),
        recompute=modules[layout.recompute] if recomputes else (),
        offloads_activations=_offloads(layout, common.compiled, recomputes, is_last and not model.mtp_depths),
        one_head=model.heads == layout.tensor_parallel,
    )
    if model.attention_pattern == ("linear",):
        found = _linear(found, model, layout.tensor_parallel)
    elif model.latent_attention is not None:
        found = _latent(found, model)
    else:
        found = _grouped(found, model, layout)
    found = found._replace(form=block_form(model))
    if layout.precision == "fp8":
        found = found._replace(
            odd_sides=tuple(name for name, side in _sides(model, layout).items() if side % FLOAT8_MULTIPLE),
            odd_heads=_state_heads(model, layout) % FLOAT8_MULTIPLE > 0,
            fp8_recipe="" if layout.fp8_recipe in ("default", "rowwise") else layout.fp8_recipe,
        )
        fills = _has_scores(model) and not found.latent
        found = found._replace(odd_rows=fills and has_odd_rows(model, layout))
    found = _within_reach(_over_context(found, model, layout), model, layout, query_block)
    return _with_experts(found, model, layout) if found.unit == "experts" else found


def has_odd_rows(model: ModelSpec, layout: Layout) -> bool:
    """Whether the tokens of a rank are filled up in products in 8 bits that sum over them."""
    tokens = layout.micro_batch_size * (model.seq // layout.context_parallel)
    return layout.precision == "fp8" and tokens % FLOAT8_MULTIPLE > 0


def _offloads(layout: Layout, compiled: bool, recomputes: bool, is_last: bool) -> str:
    """What `runtime.parallel.offload` does to a layer."""
    if not layout.offload_activations:
        return ""
    if layout.recompute == "full" and recomputes:
        # A ring is in compiled layers what it is not where no layer offloads (`compiles_in_two`).
        in_ring = layout.context_parallel > 1 and layout.context_parallel_form == "ring"
        return "beside" if compiled and in_ring else ""
    return "kept" if is_last and layout.pipeline_parallel == 1 else "sent"


def block_form(model: ModelSpec) -> tuple[str, ...]:
    """What the layers of a model have that few models do: fields of `ModelSpec`, with words as values."""
    (kind,) = model.attention_pattern
    scores, turns = _has_scores(model), model.turned_by(kind) is not None
    norms = model.qk_norm and model.latent_attention is None and scores
    has = {
        f"attention={kind}": kind == "linear" or not model.reaches_all(kind),
        "attention_gate": model.attention_gate and scores,
        "attention_sinks": model.attention_sinks and scores,
        "attention_softcap": model.attention_softcap > 0 and scores,
        "norm_from_one": model.norm_from_one,
        f"norm_place={model.norm_place}": model.norm_place != "before",
        "output_bias": model.output_bias and not model.linear_bias and scores,
        "qk_norm_weights": norms and not model.qk_norm_weights and turns,
        "qk_norm_width=all": norms and model.qk_norm_width == "all",
        "residual_scale": model.residual_scale != 1.0,
        "rotary_dim": turns and model.rotary_dim not in (0, model.head_dim),
        "score_growth": model.score_growth is not None and not turns and scores,
        "score_scale": model.score_scale not in (0.0, model.head_dim**-0.5) and scores,
    }
    return tuple(name for name, is_there in has.items() if is_there)


def _has_scores(model: ModelSpec) -> bool:
    """Whether queries are held against keys, in layers that are of one kind."""
    return model.attention_pattern != ("linear",)


def _linear(found: Structure, model: ModelSpec, ranks: int) -> Structure:
    sizes = model.linear_attention
    assert sizes is not None
    steps = -(-model.seq // sizes.chunk)
    return found._replace(
        grouped_queries=sizes.value_heads > sizes.key_heads,
        # Compilers make other products of single matrices.
        one_head=found.compiled and sizes.value_heads == ranks,
        one_key_head=found.compiled and sizes.key_heads == ranks,
        few_steps=steps if steps < FEWEST_STEPS else 0,
        partial_step=model.seq % sizes.chunk > 0,
    )


def _within_reach(found: Structure, model: ModelSpec, layout: Layout, query_block: int) -> Structure:
    """Of scores that are capped, windows and chunks: how the tokens of a rank come out in parts.

    Ranks that gather keys have queries of two places in a sequence, of which the first rank's first ones see
    the keys of their own part only.
    """
    capped, binds = "attention_softcap" in found.form, bool(REACHES & {*found.form})
    in_chunks, gathers = "attention=chunk" in found.form, found.context_form == "all_gather"
    part = model.seq // (2 * layout.context_parallel if gathers else 1)
    whole = part - part % query_block
    if gathers and binds and (capped or in_chunks or found.unfused):
        reach = model.window + query_block - 1 if capped else model.window + 1
        found = found._replace(short_window=reach <= (whole if capped else part))
    if capped:
        return found._replace(few_steps=int(not whole), partial_step=0 < whole < part)
    apart = in_chunks and not model.attention_sinks and (found.short_window or not gathers)
    return found._replace(partial_step=part % model.window > 0) if apart else found


def _grouped(found: Structure, model: ModelSpec, layout: Layout) -> Structure:
    tp = layout.tensor_parallel
    return found._replace(
        qkv_bias=model.linear_bias or model.qkv_bias,
        qk_norm=model.norms_heads(model.attention_pattern[0]),
        grouped_queries=model.heads // tp > max(1, model.kv_heads // tp),
        one_key_head=model.kv_heads <= tp,
        shares_heads=tp > model.kv_heads,
        unaligned_heads=model.head_dim % ALIGNED_HEAD > 0,
        unfused=_is_unfused(found.precision, model.head_dim),
    )


def _sides(model: ModelSpec, layout: Layout) -> dict[str, int]:
    """Sides of the matrices of a layer as one rank multiplies by them, by name, without routed experts."""
    tp, sizes = layout.tensor_parallel, model.latent_attention
    found = {"hidden": model.hidden, "ffn": model.ffn // tp, "shared_ffn": model.shared_expert_ffn // tp}
    state = model.linear_attention
    if state is not None and not _has_scores(model):
        return found | {"keys": state.key_size // tp, "values": state.value_size // tp}
    heads = model.heads // tp
    if sizes is None:
        return found | {
            "queries": heads * model.head_dim,
            "keys": max(1, model.kv_heads // tp) * model.head_dim,
        }
    keys = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
    return found | {
        "query_rank": sizes.q_lora_rank,
        "latent_rank": sizes.kv_lora_rank,
        "compressed": sizes.kv_lora_rank + sizes.qk_rope_head_dim,
        "queries": heads * keys,
        "keys": heads * (sizes.qk_nope_head_dim + sizes.v_head_dim),
        "values": heads * sizes.v_head_dim,
    }


def _state_heads(model: ModelSpec, layout: Layout) -> int:
    """Heads of the values of linear attention on one rank; 0 without it."""
    state = model.linear_attention
    return 0 if state is None or _has_scores(model) else state.value_heads // layout.tensor_parallel


def _is_unfused(precision: str, head: int) -> bool:
    """Whether flash attention does not take heads of this size and precision."""
    return precision == "fp32" or head > FLASH_HEAD


def _latent(found: Structure, model: ModelSpec) -> Structure:
    sizes, scaling = model.latent_attention, model.rope_scaling
    assert sizes is not None
    keys = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
    longer = "" if keys == sizes.v_head_dim else "keys" if keys > sizes.v_head_dim else "values"
    return found._replace(
        latent=True,
        latent_queries=sizes.q_lora_rank > 0,
        longer_heads=longer,
        # `runtime.model.rotary.score_factor` is not 1.
        scales_scores=scaling is not None and scaling.mscale_all_dim > 0 and scaling.factor > 1,
        unaligned_heads=keys % ALIGNED_HEAD > 0,
        unfused=max(keys, sizes.v_head_dim) > FLASH_HEAD and found.precision != "fp32",
    )


def _over_context(found: Structure, model: ModelSpec, layout: Layout) -> Structure:
    ranks, form = layout.context_parallel, layout.context_parallel_form
    if ranks == 1:
        return found
    found = found._replace(context_form=form)
    if form == "ring":
        return found._replace(context_ranks=ranks)
    if form == "all_gather":
        return found
    heads = model.heads // layout.tensor_parallel
    keys = heads if found.latent else max(1, model.kv_heads // layout.tensor_parallel)
    return found._replace(
        one_head=heads == ranks, one_key_head=ranks % keys == 0, repeats_heads=keys % ranks > 0
    )


def _router_form(router: Router) -> tuple[str, ...]:
    """What routers have that few do."""
    has = {"router_bias": router.bias, "weighs_inputs": router.weighs_inputs}
    return tuple(name for name, is_there in has.items() if is_there)


def _with_experts(found: Structure, model: ModelSpec, layout: Layout) -> Structure:
    ep, etp, router = layout.expert_parallel, layout.expert_tensor_parallel, model.router
    sides = model.hidden, model.expert_ffn // etp
    aligned = not any(side % GROUPED_MULTIPLE for side in sides)
    grouped = aligned and layout.precision in ("bf16", "fp8")
    limit = router.capacity_factor
    few = model.top_k, router.groups, router.top_groups
    return found._replace(
        expert_parallel=ep > 1,
        expert_tensor_parallel=etp > 1,
        expert_ranks=etp if ep > 1 else 1,
        loop_of_experts=0 if grouped else model.experts // ep,
        loop_choices=() if grouped else few,
        odd_rows=found.odd_rows and grouped,
        whole=found.compiled and grouped and experts_are_whole(model, layout),
        score=router.score,
        normalised=router.normalised,
        scaled=router.scale != 1.0,
        expert_bias=router.expert_bias,
        group_score=router.group_score if router.groups > 1 else "",
        one_choice=model.top_k == 1,
        limited="" if not limit else "part" if limit < 1 else "full",
        form=(*found.form, *_router_form(router)),
        shared_experts=model.shared_expert_ffn > 0,
        shared_gate=model.shared_expert_gate,
    )
