"""Scripts of Megatron-LM and MindSpeed are read into the layout that these would run, and written back."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner.formats
from costmodels import ModelSpec
from costmodels.catalogue import load_model, model_names
from costmodels.errors import InputError
from costmodels.spec.layout import Layout
from planner import check, search
from planner.formats.facts.flag_catalogue import known_flags
from planner.formats.facts.reading import Reading
from planner.formats.files import read_files
from planner.formats.megatron.export import export_megatron, stage_layout
from planner.formats.megatron.reader import read_megatron
from planner.options.flags import flag_names
from planner.options.megatron import ACCEPTED
from tests.support.guides import guide
from tests.support.scripts import MINDSPEED

MODEL = """
--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048
--vocab-size 50257 --bf16 --lr 1e-4 --train-iters 10
"""


INTERLEAVED = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"


def read(arguments: str, world_size: int | None = 16, model: str = MODEL) -> Reading:
    """The reading of a command with these arguments, which begin on its third line."""
    connections = 8 if "fsdp" in arguments else 1
    command = f"torchrun pretrain_gpt.py {' '.join(model.split())}"
    script = f"export CUDA_DEVICE_MAX_CONNECTIONS={connections}\n{command} \\\n"
    reading = read_megatron(script + arguments.strip().replace("\n", " \\\n"), "job.sh", {}, world_size)
    assert reading is not None
    return reading


def layout_of(arguments: str, world_size: int = 16) -> Layout:
    """The layout of a command that is legal."""
    reading = read(arguments, world_size)
    assert reading.layout is not None, reading.problems
    return reading.layout


def test_every_flag_that_the_planner_accepts_is_in_the_catalogue() -> None:
    assert {flag_names(field)[0] for field in ACCEPTED} <= known_flags().keys()
    assert len(known_flags()) > 1700


def test_flags_that_say_what_is_priced_are_read_somewhere() -> None:
    folder = Path(planner.formats.__file__).parent
    code = "".join(file.read_text() for file in (folder / "megatron").glob("*.py"))
    special = [flag.name for flag in known_flags().values() if flag.role == "special"]
    assert [name for name in special if f'"{name}"' not in code] == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--micro-batch-size 1", "tp=1 pp=1 dp=16 zero=0 mbs=1 x 1 recompute=none"),
        (
            "--micro-batch-size 2 --global-batch-size 64 --tensor-model-parallel-size 2 --sequence-parallel "
            "--pipeline-model-parallel-size 4 --use-distributed-optimizer",
            "tp=2+sp pp=4 dp=2 zero=1 mbs=2 x 16 recompute=none",
        ),
        (
            "--micro-batch-size 1 --global-batch-size 16 --pipeline-model-parallel-size 4 "
            "--num-layers-per-virtual-pipeline-stage 2 --recompute-activations",
            "tp=1 pp=4 vpp=3 dp=4 zero=0 mbs=1 x 4 recompute=selective",
        ),
        (
            "--micro-batch-size 1 --context-parallel-size 2 --cp-comm-type a2a --recompute-granularity full "
            "--recompute-method block --recompute-num-layers 3 --optimizer sgd",
            "tp=1 pp=1 cp=2 cp_form=all_to_all dp=8 zero=0 mbs=1 x 1 recompute=full/block:3 optimizer=sgd",
        ),
        (
            "--micro-batch-size 1 --context-parallel-size 2 --context-parallel-algo megatron_cp_algo "
            "--swap-attention --recompute-num-layers 2",
            "tp=1 pp=1 cp=2 cp_form=ring dp=8 zero=0 mbs=1 x 1 recompute=selective(mlp)/block:2 "
            "offload=activations",
        ),
        (
            "--micro-batch-size 1 --num-experts 8 --expert-model-parallel-size 4 --sequence-parallel "
            "--tensor-model-parallel-size 2 --moe-tp-extend-ep",
            "tp=2+sp pp=1 ep=8 dp=8 zero=0 mbs=1 x 1 recompute=none",
        ),
        (
            "--micro-batch-size 1 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
            "tp=1 pp=1 dp=16 zero=3 mbs=1 x 1 recompute=none",
        ),
        (
            "--micro-batch-size 1 --activations-checkpoint-method uniform "
            "--activations-checkpoint-num-layers 2",
            "tp=1 pp=1 dp=16 zero=0 mbs=1 x 1 recompute=full/uniform:2",
        ),
        (
            "--micro-batch-size 1 --deepspeed --zero-stage 1 --checkpoint-activations --cpu-optimizer",
            "tp=1 pp=1 dp=16 zero=1 mbs=1 x 1 recompute=full offload=optimizer",
        ),
        # BLOOM's scripts: "bf16 must use z0! it implements its own zero stage 1 equivalent".
        (
            "--micro-batch-size 1 --deepspeed --zero-stage 0",
            "tp=1 pp=1 dp=16 zero=1 mbs=1 x 1 recompute=none",
        ),
        (
            "--micro-batch-size 1 --deepspeed --zero-stage 0 --no-pipeline-parallel",
            "tp=1 pp=1 dp=16 zero=0 mbs=1 x 1 recompute=none",
        ),
        (
            "--micro-batch-size 1 --num-experts 4 --multi-latent-attention --kv-channels 128 "
            "--position-embedding-type rope --recompute-granularity selective "
            "--recompute-modules mla_up_proj mlp moe",
            "tp=1 pp=1 dp=16 zero=0 mbs=1 x 1 recompute=selective(mlp)",
        ),
        (
            # `mlp` recomputes nothing in a layer with experts.
            "--micro-batch-size 1 --num-experts 4 --recompute-granularity selective --recompute-modules mlp",
            "tp=1 pp=1 dp=16 zero=0 mbs=1 x 1 recompute=none",
        ),
    ],
)
def test_defaults_and_meanings_are_those_of_the_framework(arguments: str, expected: str) -> None:
    assert layout_of(arguments).describe() == expected


@pytest.mark.parametrize(
    ("arguments", "stages"),
    [
        ("--decoder-first-pipeline-num-layers 3", (3, 7, 7, 7)),
        ("--decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 6", (4, 7, 7, 6)),
        ("--pipeline-model-parallel-layout 'Et*5|(t*7|)*2t*5L'", (5, 7, 7, 5)),
        ("--pipeline-model-parallel-layout 'Ett|(ttt|)*6t*4L'", (2, 3, 3, 3, 3, 3, 3, 4)),
        ("--num-layer-list 5,6,6,7", (5, 6, 6, 7)),
        (f"--pipeline-model-parallel-layout 'Et*1|{'t*1|' * 22}t*1L'", (1,) * 24),
    ],
)
def test_layers_of_stages(arguments: str, stages: tuple[int, ...]) -> None:
    batch = "--micro-batch-size 1 --global-batch-size 16 --pipeline-model-parallel-size 4 "
    assert layout_of(batch + arguments).layers_per_stage == stages


DEEPSPEED = "--micro-batch-size 1 --deepspeed --zero-stage 1 --no-pipeline-parallel"


@pytest.mark.parametrize(
    ("flags", "top_k", "kinds"),
    [
        ("--num-experts 8", 1, ["dense", "experts"] * 12),
        ("--num-experts 8 --topk 2 --expert-interval 1", 2, ["experts"] * 24),
        ("--num-experts 8 --expert-interval 3", 1, ["dense", "dense", "experts"] * 8),
        ("--num-experts 8 8 8", 1, ["dense", "experts"] * 12),
        ("--num-experts 1", 0, ["dense"] * 24),
    ],
)
def test_deepspeed_has_experts_in_every_second_layer_and_one_a_token(
    flags: str, top_k: int, kinds: list[str]
) -> None:
    reading = read(f"{DEEPSPEED} {flags}")
    assert reading.layout is not None and reading.model is not None, reading.problems
    model = reading.model
    experts = sum(1 for one in kinds if one == "experts")
    assert model.moe_layers == experts and (model.top_k if experts else 0) == top_k
    assert [one.text for one in reading.problems if "belongs to no flag" in one.text] == []
    # By hand: an MLP of 8 h^2 + 5 h, a router of h x 8, attention and norms of layers, both embeddings.
    hidden, mlp = 1024, 8 * 1024**2 + 5 * 1024
    rest = 24 * (4 * hidden**2 + 4 * hidden + 4 * hidden) + (50257 + 2048) * hidden + 2 * hidden
    assert model.parameters == rest + (24 - experts) * mlp + experts * (8 * mlp + 8 * hidden)


def test_deepspeeds_layers_of_different_experts_are_not_known() -> None:
    reading = read(f"{DEEPSPEED} --num-experts 8 8 16")
    assert [one.flag for one in reading.problems if one.severity == "unknown"] == ["--num-experts"]


def test_mindspeeds_experts_stand_in_every_nth_layer() -> None:
    model = read("--micro-batch-size 1 --num-experts 8 --expert-interval 4 --moe-tp-extend-ep").model
    assert model is not None and (model.moe_layers, model.top_k) == (6, 2)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("--ds-sequence-parallel-size 1", "tp=1 pp=1 dp=16"),
        ("--ds-sequence-parallel-size 4", "tp=1 pp=1 cp=4 cp_form=all_to_all dp=4"),
        ("--num-experts 8 --moe-expert-parallel-size 4 --tensor-model-parallel-size 2", "tp=2 pp=1 ep=4"),
    ],
)
def test_deepspeed_splits_sequences_by_heads_and_needs_no_sequence_parallelism(
    more: str, expected: str
) -> None:
    assert layout_of(f"{DEEPSPEED} {more}").describe().startswith(expected)


@pytest.mark.parametrize(
    ("more", "severity"),
    [
        ("", "note"),
        ("--deepspeed --zero-stage 1 --no-pipeline-parallel", None),
        ("--moe-tp-extend-ep", "illegal"),
    ],
)
def test_experts_in_fp16_are_refused_by_software_of_old_megatron_alone(
    more: str, severity: str | None
) -> None:
    arguments = f"--micro-batch-size 1 --num-experts 8 --expert-model-parallel-size 4 --fp16 {more}"
    reading = read(arguments, model=MODEL.replace("--bf16", ""))
    found = [one.severity for one in reading.problems if one.flag == "--fp16"]
    assert found == ([severity] if severity else [])
    assert (reading.layout is None) == (severity == "illegal")


def test_the_batch_of_megatron_1_is_deepspeeds_microbatch() -> None:
    layout = layout_of("--batch-size 4 --deepspeed --zero-stage 2 --no-pipeline-parallel")
    assert (layout.micro_batch_size, layout.global_batch_size, layout.zero_stage) == (4, 64, 2)


@pytest.mark.parametrize(
    ("more", "bound"),
    [
        ("--moe-zero-memory level1", True),
        ("--moe-zero-memory disable", False),
        ("--deepspeed --zero-stage 1 --checkpoint-in-cpu", True),
        ("--use-megatron-fsdp --megatron-fsdp-main-grads-dtype bf16", True),
        ("--use-megatron-fsdp --megatron-fsdp-main-grads-dtype fp32", False),
        ("--tp-comm-overlap", False),
    ],
)
def test_a_job_that_keeps_less_than_is_priced_may_fit(more: str, bound: bool) -> None:
    assert read(f"--micro-batch-size 1 {more}").memory_is_bound is bound


def test_latent_attention_with_rotary_positions_learns_none() -> None:
    flags = "--micro-batch-size 1 --multi-latent-attention --use-rotary-position-embeddings"
    assert [one.flag for one in read(flags).problems if one.flag == "--multi-latent-attention"] == []


@pytest.mark.parametrize(
    ("arguments", "flag", "text"),
    [
        ("", "--micro-batch-size", "is missing"),
        (
            "--micro-batch-size 1\n--tensor-model-parallel-size 3",
            "--tensor-model-parallel-size",
            "not a multiple",
        ),
        (
            "--micro-batch-size 1\n--tensor-model-parallel-size 32",
            "--tensor-model-parallel-size",
            "16 devices",
        ),
        (
            "--micro-batch-size 1\n--pipeline-model-parallel-size 16",
            "--pipeline-model-parallel-size",
            "24 layers",
        ),
        ("--micro-batch-size 1\n--global-batch-size 20", "--global-batch-size", "not a multiple"),
        ("--micro-batch-size 1\n--global-batch-size 2x", "--global-batch-size", "not a whole number"),
        ("--micro-batch-size 1\n--fp16", "--fp16", "both"),
        ("--micro-batch-size 1\n--batch-size 4", "--batch-size", "refused since"),
        ("--micro-batch-size 1\n--min-lr 1", "--min-lr", "more than --lr"),
        ("--micro-batch-size 1\n--mock-data --data-path x", "--mock-data", "both"),
        ("--micro-batch-size 1\n--lr-decay-samples 4", "--lr-decay-samples", "schedules go by iterations"),
        ("--micro-batch-size 1\n--save here", "--save", "needs --save-interval"),
        (
            "--micro-batch-size 1\n--pipeline-model-parallel-size 100000000",
            "--pipeline-model-parallel-size",
            "more than the 24 layers",
        ),
        (
            "--micro-batch-size 1 --recompute-granularity selective\n--recompute-method block",
            "--recompute-method",
            "granularity full",
        ),
        (
            "--micro-batch-size 1\n--overlap-param-gather",
            "--overlap-param-gather",
            "--use-distributed-optimizer",
        ),
        (
            "--micro-batch-size 1\n--expert-model-parallel-size 2",
            "--expert-model-parallel-size",
            "no experts",
        ),
        (
            "--micro-batch-size 1\n--num-experts 6 --expert-model-parallel-size 4",
            "--expert-model-parallel-size",
            "6",
        ),
        (
            "--micro-batch-size 1\n--context-parallel-size 16 --seq-length 2000",
            "--context-parallel-size",
            "2 x 16",
        ),
        (
            "--micro-batch-size 1\n--group-query-attention --num-query-groups 5",
            "--num-query-groups",
            "kv_heads",
        ),
        (
            "--micro-batch-size 1 --group-query-attention --num-query-groups 4 --cp-comm-type a2a "
            "--tensor-model-parallel-size 2\n--context-parallel-size 4",
            "--context-parallel-size",
            "2 query groups of a tensor-parallel rank",
        ),
        (
            "--micro-batch-size 1 --window-size 127,0\n--context-parallel-size 2",
            "--context-parallel-size",
            "no sliding windows with --cp-comm-type p2p",
        ),
        (
            "--micro-batch-size 1 --softmax-type learnable --cp-comm-type all_gather\n"
            "--context-parallel-size 2",
            "--context-parallel-size",
            "a2a alone",
        ),
        ("--micro-batch-size 1\n--swiglu --squared-relu", "--swiglu", "contradict"),
    ],
)
def test_what_is_illegal_names_the_flag_and_its_line(arguments: str, flag: str, text: str) -> None:
    reading = read(arguments)
    wrong = [problem for problem in reading.problems if problem.severity == "illegal"]
    assert [problem.flag for problem in wrong][:1] == [flag] and text in wrong[0].text + wrong[0].remedy
    if wrong[0].line is not None and flag in arguments:
        assert wrong[0].line == 3 + arguments[: arguments.index(flag)].count("\n")
    assert reading.layout is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--lr-warmup-samples 0", "mbs=1"),
        ("--recompute-num-layers 2", "recompute=none"),
        ("--num-experts 4 --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn", "tp=1"),
        ("--multi-latent-attention", "tp=1"),
        (
            "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method block "
            "--recompute-num-layers 13",
            "recompute=full/block:12",
        ),
        (
            f"{INTERLEAVED} --global-batch-size 48 --microbatch-group-size-per-virtual-pipeline-stage 6",
            "pp=4 vpp=2",
        ),
    ],
)
def test_what_megatrons_own_tests_run_is_legal(arguments: str, expected: str) -> None:
    reading = read(f"--micro-batch-size 1 {arguments}")
    assert reading.layout is not None, reading.problems
    assert not [problem for problem in reading.problems if problem.severity != "note"]
    assert expected in reading.layout.describe()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        # Groups of 5 of 10 microbatches keep four ranks busy; how, is not priced.
        ("--global-batch-size 40 --microbatch-group-size-per-virtual-pipeline-stage 5", "unknown"),
        ("--global-batch-size 48 --microbatch-group-size-per-virtual-pipeline-stage 5", "illegal"),
        ("--global-batch-size 48 --microbatch-group-size-per-virtual-pipeline-stage 3", "illegal"),
        ("--global-batch-size 40", "illegal"),
    ],
)
def test_the_last_group_of_micro_batches_fills_the_pipeline(arguments: str, named: str) -> None:
    reading = read(f"--micro-batch-size 1 {INTERLEAVED} {arguments}")
    assert {problem.severity for problem in reading.problems} == {named}


def test_embedding_and_loss_count_as_layers_before_stages_are_too_many() -> None:
    model = MODEL.replace("--num-layers 24", "--num-layers 6")
    flags = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    parallel = (
        "--micro-batch-size 1 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
    )
    reading = read(f"{parallel} --global-batch-size 16 {flags}", model=model)
    assert [problem.severity for problem in reading.problems] == ["unknown"]  # The first stage has no layer.


def test_flags_are_named_by_what_they_do() -> None:
    reading = read(
        "--micro-batch-size 1 --tp-comm-overlap --mamba-num-heads 1 --wandb-project x --num-layer 3"
    )
    roles = reading.by_role
    assert roles["unpriced"] == ("--tp-comm-overlap",)
    assert roles["unsupported"] == ("--mamba-num-heads",)
    assert roles["harmless"] == ("--wandb-project",)
    assert roles["unknown"] == ("--num-layer",)
    named = {(problem.flag, problem.severity) for problem in reading.problems}
    assert {
        ("--tp-comm-overlap", "note"),
        ("--mamba-num-heads", "unknown"),
        ("--num-layer", "unknown"),
    } <= named


def test_variables_from_outside_are_asked_for_and_taken() -> None:
    script = "torchrun --nproc_per_node 8 --nnodes $NNODES pretrain_gpt.py $MODEL --micro-batch-size $MBS"
    values = {"MODEL": " ".join(MODEL.split())}
    reading = read_megatron(script, "job.sh", values)
    assert reading is not None and reading.world_size is None
    assert {problem.flag for problem in reading.problems} == {"--nnodes", "--micro-batch-size"}
    whole = read_megatron(script, "job.sh", {**values, "NNODES": "2", "MBS": "4"})
    assert whole is not None and whole.layout is not None
    assert (whole.world_size, whole.layout.describe()) == (
        16,
        "tp=1 pp=1 dp=16 zero=0 mbs=4 x 1 recompute=none",
    )


def test_mindspeeds_arguments_are_read_alone() -> None:
    reading = read_megatron(MINDSPEED, "arguments.txt", {}, 8)
    assert reading is not None and reading.layout is not None
    assert (reading.framework, reading.engine) == ("mindspeed", "mindspeed")
    assert reading.layout.describe() == (
        "tp=2+sp pp=1 ep=2 etp=2 dp=4 zero=1 mbs=1 x 1 recompute=selective(activation) offload=activations"
    )
    assert not {"unknown", "unsupported", "unpriced"} & reading.by_role.keys()


def test_the_guide_of_mindspeed_is_judged_as_it_stands() -> None:
    answer = check(guide("mindspeed-moe.txt"))
    assert (answer.legal, answer.fits) == (True, True)
    assert answer.plan is not None and answer.best is not None and answer.gain is not None
    assert answer.gain >= 1
    assert answer.plan.layout.describe().startswith("tp=2+sp pp=1 ep=2 etp=2 dp=4 zero=1 mbs=1 x 1")
    lines = guide("mindspeed-moe.txt").read_text(encoding="utf-8").splitlines()
    for change in answer.changes:
        assert change.line is None or change.flag in lines[change.line - 1]


def test_the_guide_of_pai_leaves_the_layout_to_its_tool() -> None:
    answer = check(guide("pai-llmacc.txt"))
    assert answer.legal is True and answer.plan is None and answer.reading.world_size == 16
    assert answer.best is not None and answer.best.layout.global_batch_size <= 32
    assert answer.best.model.layers == 48


@pytest.mark.parametrize("precision", ["--bf16", "--bf16 --fp8-format hybrid", "--bf16 --fp4-format e2m1"])
def test_what_rests_on_a_device_that_nobody_says_is_not_known(precision: str, tmp_path: Path) -> None:
    """Legality does not: fp8 is not called illegal because some device lacks it."""
    flags = f"--hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 32000 {precision}"
    flags += " --num-layers 8 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 8"
    (tmp_path / "train.sh").write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags}\n")
    answer = check(tmp_path / "train.sh")
    assert answer.legal is True
    assert (answer.fits, answer.plan, answer.best, answer.gain) == (None, None, None, None)
    assert [one.flag for one in answer.unknown] == ["--device"]
    illegal = tmp_path / "illegal.sh"
    flags += " --tensor-model-parallel-size 3"
    illegal.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags}\n")
    assert check(illegal).legal is False
    known = check(tmp_path / "train.sh", device="b200")
    assert known.legal and known.fits and not known.unknown


@pytest.mark.parametrize("name", model_names())
def test_models_are_written_and_read_back(name: str) -> None:
    model = load_model(name)
    layout = Layout(layers_per_stage=(model.layers,), global_batch_size=1)
    exported = export_megatron(model, layout)
    if exported.inexpressible:
        return
    reading = read_megatron(exported.text, "flags.txt", {}, 1)
    assert reading is not None and reading.model is not None, reading and reading.problems
    assert shape(reading.model) == shape(model)


def shape(model: ModelSpec) -> dict[str, object]:
    """Fields of a model that flags give, with GELU in one form; names and untrained parts are left out."""
    values = model.model_dump(exclude={"name", "source", "published_parameters", "mtp_layers"})
    pattern = tuple(model.layer_kind(layer).attention for layer in range(model.layers))
    return values | {"activation": values["activation"].removesuffix("_tanh"), "attention_pattern": pattern}


WINDOWS = ModelSpec(
    name="windows",
    layers=6,
    hidden=512,
    heads=8,
    kv_heads=2,
    vocab=32000,
    seq=2048,
    position="rope",
    window=128,
    attention_pattern=("window", "window", "full"),
    attention_sinks=True,
    rotates_full=False,
    qk_norm=True,
    norm="rmsnorm",
)


def megatrons(model: ModelSpec) -> dict[str, str]:
    """Flags of a model, each with its value as a shell passes it."""
    exported = export_megatron(model, Layout(layers_per_stage=(model.layers,), global_batch_size=1))
    words = shlex.split(exported.text)
    starts = [at for at, word in enumerate(words) if word.startswith("--")]
    return {
        words[at]: " ".join(words[at + 1 : end]) for at, end in zip(starts, [*starts[1:], None], strict=True)
    }


def listed(text: str) -> list[int]:
    """A list of layers as Megatron-LM evaluates it (arguments.py, `_eval_pattern`)."""
    assert set(text) <= set("[](),*+0123456789")
    return list(eval(text))


def test_windows_sinks_and_layers_without_positions_are_megatrons() -> None:
    """Flags by Megatron-LM's use of them (core/transformer/utils.py, `is_layer_window_attention`)."""
    flags = megatrons(WINDOWS)
    left, right = map(int, flags["--window-size"].split(","))
    seen = [position for position in range(2048) if 1000 - left <= position <= 1000 + right]
    assert len(seen) == WINDOWS.window and max(seen) == 1000
    assert listed(flags["--window-attn-skip-freq"]) == [1, 1, 0, 1, 1, 0]
    assert listed(flags["--no-rope-freq"]) == [0, 0, 1, 0, 0, 1]
    assert flags["--softmax-type"] == "learnable" and "--qk-layernorm" in flags


def test_linear_attention_gates_and_parts_of_heads_are_megatrons() -> None:
    linear = {"kind": "gated_delta", "key_heads": 2, "value_heads": 4, "key_dim": 64, "value_dim": 32}
    values = WINDOWS.model_dump() | {
        "attention_pattern": ("linear", "linear", "full"),
        "linear_attention": linear,
        "attention_gate": True,
        "rotary_dim": 16,
        "attention_sinks": False,
        "rotates_full": True,
    }
    flags = megatrons(ModelSpec.model_validate(values))
    assert listed(flags["--linear-attention-freq"]) == [1, 1, 0, 1, 1, 0]
    sizes = ("num-key-heads", "num-value-heads", "key-head-dim", "value-head-dim", "conv-kernel-dim")
    assert [int(flags[f"--linear-{name}"]) for name in sizes] == [2, 4, 64, 32, 4]
    assert "--attention-output-gate" in flags and int(64 * float(flags["--rotary-percent"])) == 16


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        ("--window-size 127,0", ["window"] * 4),
        ("--window-size '(127,0)' --window-attn-skip-freq 2", ["window", "full", "window", "full"]),
        ("--window-size 127,0 --window-attn-skip-freq [1,1,0,0]", ["window", "window", "full", "full"]),
        (
            "--experimental-attention-variant gdn --linear-attention-freq 4",
            ["linear", "linear", "linear", "full"],
        ),
    ],
)
def test_forms_of_attention_are_read_as_megatron_does(flags: str, kinds: list[str]) -> None:
    text = (
        "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 "
        f"--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 1 --bf16 {flags}"
    )
    reading = read_megatron(text, "flags.txt", {}, 1)
    assert reading is not None and reading.model is not None, reading and reading.problems
    assert [reading.model.layer_kind(layer).attention for layer in range(4)] == kinds
    assert reading.model.window == (128 if "window" in kinds else 0)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--window-size x", "--window-size"),
        ("--window-size 127,0 --window-attn-skip-freq [1,0]", "--window-attn-skip-freq"),
        (
            "--experimental-attention-variant gdn --linear-attention-freq __import__('os')",
            "--linear-attention",
        ),
        ("--position-embedding-type rope --rotary-percent 1.5", "--rotary-percent"),
    ],
)
def test_forms_of_attention_that_are_none_are_illegal(flags: str, named: str) -> None:
    text = (
        "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 "
        f"--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 1 --bf16 {flags}"
    )
    reading = read_megatron(text, "flags.txt", {}, 1)
    assert reading is not None and reading.model is None
    assert any(one.severity == "illegal" and one.flag.startswith(named) for one in reading.problems)


DENSE = load_model("llama3-8b").model_copy(update={"layers": 12})
EXPERTS = ModelSpec(
    name="mixture", layers=8, hidden=512, heads=8, vocab=32000, seq=2048, experts=8, expert_ffn=1024, top_k=2
)


@pytest.mark.parametrize("framework", ["megatron", "mindspeed"])
@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_plans_of_a_search_are_written_and_read_back(model: ModelSpec, framework: str) -> None:
    device = "ascend-910b" if framework == "mindspeed" else "a100-80g"
    result = search(
        model, world_size=16, device=device, engine=framework, global_batch_size=32, precision="bf16"
    )
    table = result.table

    @settings(max_examples=30)
    @given(st.integers(0, len(table) - 1))
    def round_trip(row: int) -> None:
        layout = table.layout(row)
        exported = export_megatron(model, layout, framework)
        reading = read_megatron(exported.text, "flags.txt", {}, 16)
        assert reading is not None
        if exported.inexpressible:
            return
        assert reading.layout == layout, reading.problems
        assert reading.framework in (framework, "megatron")

    round_trip()


def test_routers_have_biases_where_linear_layers_have() -> None:
    model = load_model("gpt-oss-20b")
    layout = Layout(layers_per_stage=(model.layers,), global_batch_size=1)
    assert export_megatron(model, layout).inexpressible == ()
    plain = ModelSpec.model_validate(model.model_dump() | {"linear_bias": False})
    assert [text.partition("=")[0] for text in export_megatron(plain, layout).inexpressible] == [
        "router.bias"
    ]


@pytest.mark.parametrize("name", ["llama3.1-8b", "deepseek-v3", "deepseek-v2", "kimi-k2"])
def test_scaled_positions_are_mindspeeds(name: str) -> None:
    model = load_model(name)
    layout = Layout(layers_per_stage=(model.layers,), global_batch_size=1)
    exported = export_megatron(model, layout, "mindspeed")
    assert not [text for text in exported.inexpressible if text.startswith("rope_scaling")]
    reading = read_megatron(exported.text, "flags.txt", {}, 1)
    assert reading is not None and reading.model is not None, reading and reading.problems
    assert (reading.framework, reading.model.rope_scaling) == ("mindspeed", model.rope_scaling)


def test_scaled_positions_of_a_script_of_mindspeed() -> None:
    """The positions of DeepSeek-V2-Lite in MindSpeed-LLM's examples, with the former names of two flags."""
    text = (
        "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --multi-latent-attention "
        "--max-position-embeddings 163840 --micro-batch-size 1 --global-batch-size 1 --bf16 "
        "--position-embedding-type rope --rope-scaling-beta-fast 32 --rope-scaling-beta-slow 1 "
        "--rope-scaling-factor 40 --rope-scaling-mscale 0.707 --rope-scaling-mscale-all-dim 0.707 "
        "--rope-scaling-original-max-position-embeddings 4096 --rope-scaling-type yarn"
    )
    reading = read_megatron(text, "flags.txt", {}, 1)
    assert reading is not None and reading.model is not None, reading and reading.problems
    assert reading.model.rope_scaling == load_model("deepseek-v2-lite").rope_scaling


def test_layers_of_stages_are_written_in_letters() -> None:
    assert stage_layout((3, 4, 1)) == "Et*3|t*4|tL"


@pytest.mark.parametrize(
    ("schedule", "zero", "named"), [("zbv", 0, "schedule"), ("1f1b", 2, "")], ids=["schedule", "zero"]
)
def test_what_has_no_flag_is_named(schedule: Any, zero: Any, named: str) -> None:
    layout = Layout(
        pipeline_parallel=2,
        virtual_pipeline_parallel=2 if schedule == "zbv" else 1,
        schedule=schedule,
        layers_per_stage=(3,) * 4 if schedule == "zbv" else (6, 6),
        data_parallel=2,
        zero_stage=zero,
        global_batch_size=8,
    )
    missing = export_megatron(DENSE, layout).inexpressible
    assert [text.partition("=")[0] for text in missing] == ([named] if named else [])
    assert bool(export_megatron(DENSE, layout, "mindspeed").inexpressible)


def test_a_script_and_the_config_of_its_model_go_together(tmp_path: Path) -> None:
    script, config = tmp_path / "job.sh", tmp_path / "config.json"
    script.write_text(
        "torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 1 --global-batch-size 8 --bf16 "
        "--lr 1 --seq-length 1024"
    )
    config.write_text(
        '{"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, '
        '"intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 2048}'
    )
    reading = read_files([script, config])
    assert reading.model is not None and reading.layout is not None
    assert (reading.model.layers, reading.model.seq, reading.model.ffn) == (4, 1024, 512)


def test_a_script_writes_its_deepspeed_configuration_and_sources_its_sizes(tmp_path: Path) -> None:
    script, sizes = tmp_path / "train.sh", tmp_path / "sizes.sh"
    script.write_text(
        'source sizes.sh\nSTAGE=2\ncat <<EOT > ds.json\n{"zero_optimization": {"stage": $STAGE}, '
        '"fp16": {"enabled": true}, "train_batch_size": 16}\nEOT\n'
        "deepspeed --num_gpus 8 pretrain_gpt.py --num-layers $LAYERS --hidden-size 512 "
        "--num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 "
        "--global-batch-size 16 --fp16 --deepspeed --deepspeed_config ds.json --no-pipeline-parallel\n"
    )
    sizes.write_text("export LAYERS=4\n")
    reading = read_files([script, sizes])
    assert reading.layout is not None and reading.layout.zero_stage == 2
    alone = read_files([script])
    assert alone.layout is None
    assert [(one.flag, one.line) for one in alone.problems if one.severity == "unknown"] == [
        ("--num-layers", 6)
    ]
    assert ("source", 1) in [(one.flag, one.line) for one in alone.problems]


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("nothing of interest")
    for files, expected in (
        ([], "no file"),
        ([tmp_path / "none.sh"], "cannot read"),
        ([tmp_path], "cannot read"),
        ([text], "nothing in it starts"),
    ):
        with pytest.raises(InputError, match=expected):
            read_files(files)
    with pytest.raises(InputError, match="NAME=VALUE"):
        read_files([text], define=["a:b=1"])


WORDS = st.sampled_from(
    [*sorted(known_flags()), "0", "-1", "2", "3", "1e99", "$X", "abc", "'", "((", "9" * 40, ""]
)


@pytest.mark.slow
@given(st.lists(WORDS, max_size=12), st.sampled_from([None, 1, 6, 16]))
def test_no_flags_raise(words: list[str], world_size: int | None) -> None:
    reading = read("--micro-batch-size 1 " + " ".join(words), world_size)
    assert all(problem.describe() and "\n" not in problem.describe() for problem in reading.problems)
    assert dataclasses.asdict(reading)
