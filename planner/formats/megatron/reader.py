"""Command lines of Megatron-LM, MindSpeed and PAI's llmacc, read into a model and a layout.

The rules are those of Megatron-LM's `validate_args` (megatron/training/arguments.py) and of
`TransformerConfig.__post_init__` (megatron/core/transformer/transformer_config.py), and of MindSpeed's
features (mindspeed/features_manager).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, get_args

from pydantic import ValidationError

from costmodels.dataclass import dataclass
from costmodels.errors import InputError, on_one_line
from costmodels.spec.layout import GATHERS_FP8, Layout, RecomputeModule
from costmodels.spec.model import ModelSpec
from planner.formats.facts.definitions import is_mentioned
from planner.formats.facts.flag_catalogue import GivenFlag, given_flags, known_flags
from planner.formats.facts.keyed import DECIDING, Keyed
from planner.formats.facts.launcher import Launch, count_of, find_launch, sizes_on_page
from planner.formats.facts.launcher import world_size as launched
from planner.formats.facts.reading import Problems, Reading
from planner.formats.facts.roles import name_others
from planner.formats.facts.source import Source
from planner.formats.hugging_face import deepspeed_config
from planner.formats.megatron.aliases import with_todays_names
from planner.formats.megatron.export import FP8_RECIPES
from planner.formats.megatron.model import Given, blame, last_of_each, option_values, read_model, unset
from planner.formats.megatron.names import (
    COMMUNICATION_TYPES,
    CONTEXT_ALGORITHMS,
    DEGREE_FLAGS,
    OPTIMIZERS,
    SHARDING,
    UNPRICED_MODULES,
)
from planner.formats.megatron.rules import check_rules
from planner.formats.megatron.stages import layers_of_stages
from planner.formats.shell.text import Word
from planner.inputs.model import with_seq
from planner.inputs.pins import WherePossible
from planner.options.parallel import ParallelOptions

DEVICES = {"mindspeed": "ascend-910b", "llmacc": "a100-80g"}
"""Devices that software is made for, which its scripts do not name: Ascend's, and those of PAI's machines."""

EIGHT_BITS = ("--fp8-format", "--fp8-hybrid", "--fp8-e4m3")
"""Flags that ask for products in 8 bits; `--fp8-recipe` says which."""


def read_megatron(
    source: str,
    file: str,
    defined: dict[str, str],
    world_size: int | None = None,
    local_world_size: int | None = None,
    described: str | None = None,
    deepspeed: Source | None = None,
    beside: Mapping[str, str] | None = None,
) -> Reading | None:
    """The job that a script or a list of arguments starts; None where nothing in it looks like one.

    Args:
        defined: variables that the script gets from outside.
        world_size: devices of the job, where the caller knows it better than the script.
        described: the file that describes the model, where the script does not.
        deepspeed: the configuration of DeepSpeed that a script of Megatron-DeepSpeed names.
        beside: texts of the files that the script reads commands from, by their names.
    """
    launch = find_launch(source, defined, beside)
    if launch is None:
        return None
    flags, loose = given_flags(launch.arguments)
    for flag in flags:
        if deepspeed is None and flag.name in _DEEPSPEEDS:
            deepspeed = deepspeed_config.written_by(launch, flag.text, file)
    return read_command(
        flags,
        loose,
        launch,
        file,
        world_size=world_size,
        local_world_size=local_world_size,
        described=described,
        deepspeed=deepspeed,
        sizes=sizes_on_page(source),
        defined={name: value for name, value in defined.items() if not is_mentioned(name, source)},
        conditional=set(_ASSIGNED.findall(source)) & launch.assigned,
    )


_DEEPSPEEDS = ("--deepspeed_config", "--deepspeed-config")

_ASSIGNED = re.compile(r"(?<![\w-])([A-Za-z_]\w*)(?:\[[^]\n]{0,40}\])?\+?=")


def read_command(
    flags: list[GivenFlag],
    loose: list[Word],
    launch: Launch,
    file: str,
    *,
    world_size: int | None = None,
    local_world_size: int | None = None,
    described: str | None = None,
    deepspeed: Source | None = None,
    model: ModelSpec | None = None,
    framework: str | None = None,
    sizes: tuple[int | None, int | None] = (None, None),
    defined: Mapping[str, str] | None = None,
    conditional: Collection[str] = (),
) -> Reading:
    """The job that flags describe.

    Args:
        loose: words of the command that belong to no flag.
        model: the model, where it is known; flags of it then say its sequences alone.
        framework: whose flags they are, where that is known.
        sizes: nodes and devices of each, as a page says them beside the command.
        defined: values of flags by name, which come before those that are given.
        conditional: variables that the script sets, if only under a condition.
    """
    problems, assumed = Problems(file), list[str]()
    flags = with_defined(flags, defined or {})
    named = last_of_each(tuple(flags), problems)
    given = with_todays_names(named, problems)
    framework = framework or _framework(launch, given)
    name_others(named.values(), problems, "is no flag of Megatron-LM or MindSpeed that is known here")
    _name_loose(loose, problems, conditional)
    for flag in given.values():
        if flag.name in _DEEPSPEEDS and deepspeed is not None:
            continue  # It is given, or the script writes it, under whatever name.
        if flag.unknown and flag.known.role in DECIDING:
            problems.add(*unset(flag))
        elif flag.name == "--yaml-cfg":
            text = "says the job, and is not read"
            problems.add("unknown", f"{flag.text} {text}", flag.name, flag.line, "give its keys as flags")
    if model is None:
        model = read_model(given, problems, assumed, described, framework)
    else:
        model = _with_sequences(given, model, problems)
    job = _Job(given, problems, framework, model, deepspeed)
    of_page = sizes if framework == "llmacc" else (None, None)
    per_node = local_world_size or job.count("--local-world-size") or count_of(launch.per_node) or of_page[1]
    world = world_size or job.count("--world-size") or launched(launch, of_page[0], per_node)
    chooses = framework != "llmacc" or any(name in given for name in (DEGREE_FLAGS["tensor_parallel"],))
    if world is None:
        _unknown_world(launch, problems)
    layout = None
    if chooses and model is not None:
        layout = job.layout(world, launch)
    exact = layout.global_batch_size if layout is not None else job.batch()
    most = job.count("--max-global-batch-size")
    if not chooses and not (exact or most):
        problems.add(
            "unknown", "no --global-batch-size or --max-global-batch-size", "--max-global-batch-size"
        )
    if any(problem.severity == "unknown" for problem in problems.found):
        for word in launch.not_sourced:
            text = f"{word.text} is not given, and what it sets is not known"
            problems.add("note", text, "source", word.line, "give that file too")
    return Reading(
        framework=framework,
        engine=framework if framework in ("mindspeed", "megatron-deepspeed") else "megatron",
        file=file,
        model=model,
        layout=layout,
        program=launch.program,
        chooses_layout=chooses,
        precision=job.precision() if chooses or job.names_precision() else None,
        world_size=world,
        local_world_size=per_node,
        device=DEVICES.get(framework),
        global_batch_size=None if most and not chooses else exact,
        max_global_batch_size=None if chooses else most,
        flags=tuple(flags),
        names=DEGREE_FLAGS,
        training=_training(given),
        assumed=tuple(assumed),
        problems=tuple(problems.found),
        memory_is_bound=job.memory_is_bound,
    )


def _with_sequences(given: Given, model: ModelSpec, problems: Problems) -> ModelSpec:
    """A known model on sequences of the length that a flag gives."""
    flag = given.get("--seq-length")
    if flag is None or not re.fullmatch(r"[1-9][0-9]{0,8}", flag.text):
        return model
    try:
        return with_seq(model, int(flag.text))
    except InputError as error:
        problems.add("illegal", on_one_line(error), flag.name, flag.line)
        return model


def _training(given: Given) -> dict[str, str]:
    """What is learned and from which data: flags that the runtime takes too."""
    roles = ("training", "harmless")
    return {
        flag.name: flag.text
        for flag in given.values()
        if flag.known.role in roles and flag.known.framework == "megatron" and not flag.unknown
    }


def _framework(launch: Launch, given: Given) -> str:
    if launch.program.startswith("llmacc"):
        return "llmacc"
    if "--deepspeed" in given:
        return "megatron-deepspeed"
    named = [flag for flag in given.values() if flag.known.framework == "mindspeed"]
    return "mindspeed" if named else "megatron"


def with_defined(flags: list[GivenFlag], defined: Mapping[str, str]) -> list[GivenFlag]:
    """The flags with those that the caller gives; an empty value takes one out."""
    known = known_flags()
    found = list(flags)
    for name, text in defined.items():
        flag = next(
            (one for one in _spelled(name) if one in known or any(one == had.name for had in flags)), None
        )
        if flag is None:
            continue
        line = next((had.line for had in flags if had.name == flag), 0)
        of = next((had.known for had in flags if had.name == flag), known.get(flag))
        assert of is not None
        found = [had for had in found if had.name != flag]
        off = text == "" or (not of.words and text.lower() in ("false", "0", "no"))
        if not off:
            words = (Word(text, line),) if of.words else ()
            found.append(GivenFlag(flag, words, line, of))
    return found


def _spelled(name: str) -> tuple[str, ...]:
    bare = name.lstrip("-")
    return f"--{bare}", f"--{bare.replace('_', '-')}"


def _name_loose(loose: list[Any], problems: Problems, conditional: Collection[str]) -> None:
    """Words of the command that no flag takes; those that could stand for flags are not known."""
    for word in loose:
        could = [name for name in word.unknown if name in conditional or name.startswith(("$(", "`"))]
        if could:
            text = f"{could[0]} may hold flags, and is set by what is not run here"
            remedy = f"give --define {could[0]}=VALUE" if could[0] in conditional else "write the flags out"
            problems.add("unknown", text, "", word.line, remedy)
        elif not word.unknown and word.text not in ("\\", ""):
            problems.add("note", f"the word {word.text[:40]!r} belongs to no flag", line=word.line)


def _unknown_world(launch: Launch, problems: Problems) -> None:
    words = [word for word in (launch.nodes, launch.per_node) if word is not None and count_of(word) is None]
    said = f": {', '.join(word.text for word in words)} is not set in the file" if words else ""
    line = words[0].line if words else None
    text = f"the number of devices is not known{said}"
    problems.add("unknown", text, "--nnodes" if words else "", line, "give --world-size")


@dataclass
class _Job:
    given: Given
    problems: Problems
    framework: str
    model: ModelSpec | None
    deepspeed: Source | None = None
    memory_is_bound: bool = False

    def count(self, name: str) -> int | None:
        """The whole number, from 1, that a flag gives."""
        flag = self.given.get(name)
        if flag is None or not flag.values:
            return None
        if flag.unknown:
            self.problems.add(*unset(flag))
            return None
        text = flag.text.strip()
        if not (text.isascii() and text.isdigit()) or not 0 < int(text) < 10**9 or len(text) > 12:
            said = f"{text!r} is not a whole number from 1"
            self.problems.add("illegal", said, name, flag.line, certain=True)
            return None
        return int(text)

    def batch(self) -> int | None:
        """Sequences of a step; of a batch that grows in steps, the last one."""
        flag = self._word("--step-batch-size-schedule")
        if flag is None:
            return self.count("--global-batch-size")
        found = re.findall(r"[0-9.]+[KMBT]?:([1-9][0-9]{0,8})", flag.text)
        if flag.unknown or len(found) != len(flag.text.split()):
            text = f"{flag.text} is no list of TOKENS:BATCH"
            self.problems.add("unknown", text, flag.name, flag.line, "give --define global_batch_size=N")
            return None
        return int(found[-1])

    def _is_given(self, *names: str) -> bool:
        return any(name in self.given for name in names)

    def _word(self, name: str) -> GivenFlag | None:
        flag = self.given.get(name)
        return flag if flag is not None and flag.values else None

    def precision(self) -> str:
        """The number format of matrix products."""
        if self._is_given("--fp4-format"):
            return "nvfp4"
        if self._is_given(*EIGHT_BITS):
            recipe = self._word("--fp8-recipe")
            return "mxfp8" if recipe is not None and recipe.text == "mxfp8" else "fp8"
        return "bf16" if self._is_given("--bf16") else "fp16" if self._is_given("--fp16") else "fp32"

    def _fp8_recipe(self) -> str:
        """The scales of fp8, where a flag says them."""
        flag = self._word("--fp8-recipe")
        if flag is None or self.precision() != "fp8":
            return "default"
        if flag.text in FP8_RECIPES:
            return flag.text
        self.problems.add("note", f"{flag.text} is not priced: taken as delayed", "--fp8-recipe", flag.line)
        return "default"

    def _gathers_fp8(self, recipe: str) -> bool:
        """Whether weights are gathered in fp8, as far as that is priced."""
        flag = self.given.get("--fp8-param-gather")
        if flag is None or recipe in GATHERS_FP8:
            return flag is not None
        text = f"not priced but with --fp8-recipe {' or '.join(GATHERS_FP8)}: weights are gathered in 16 bits"
        self.problems.add("note", text, flag.name, flag.line)
        return False

    def names_precision(self) -> bool:
        """Whether a flag says the number format."""
        return self._is_given("--bf16", "--fp16", *EIGHT_BITS, "--fp4-format")

    def layout(self, world: int | None, launch: Launch) -> Layout | None:
        """The layout as the framework makes it of the flags, with its defaults."""
        model, problems = self.model, self.problems
        assert model is not None
        degrees: dict[str, Any] = {
            name: self.count(DEGREE_FLAGS[name]) or 1
            for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
        }
        tp = degrees["tensor_parallel"]
        degrees["expert_tensor_parallel"] = self._expert_tensor(degrees, model)
        degrees["sequence_parallel"] = self._is_given("--sequence-parallel") and tp > 1
        if degrees["context_parallel"] > 1:
            degrees["context_parallel_form"] = self._context_form()
        degrees |= layers_of_stages(self.given, model, degrees["pipeline_parallel"], self.count, problems)
        degrees |= self._memory(model)
        mbs = self.count("--micro-batch-size")
        if mbs is None and not self._is_given("--micro-batch-size"):
            problems.add("illegal", "is missing: Megatron-LM has no default for it", "--micro-batch-size")
        degrees["micro_batch_size"] = mbs or 1
        gbs = self.batch()
        check_rules(self.given, model, degrees, world, gbs, self.framework, launch, problems)
        shards = tp * degrees["pipeline_parallel"] * degrees["context_parallel"]
        if world is None or problems.fatal or world % shards:
            return None
        degrees["data_parallel"] = world // shards
        degrees["global_batch_size"] = gbs or degrees["micro_batch_size"] * degrees["data_parallel"]
        degrees["zero_stage"] = self._zero(degrees["data_parallel"] * degrees["context_parallel"])
        if degrees["zero_stage"] == 0:
            degrees.pop("zero_replicas", None)
        try:
            return Layout.model_validate(degrees)
        except ValidationError as error:
            message = on_one_line(error)
            flag = self._blamed(message)
            where = (flag.name, flag.line) if flag else ("", None)
            problems.add("illegal", message, *where)
            return None

    def _blamed(self, message: str) -> GivenFlag | None:
        return blame_degree(message, self.given)

    def _expert_tensor(self, degrees: dict[str, Any], model: ModelSpec) -> int:
        if not model.experts:
            return 1
        if self._is_given("--moe-tp-extend-ep"):
            degrees["expert_parallel"] *= degrees["tensor_parallel"]
            return 1
        return self.count("--expert-tensor-parallel-size") or int(degrees["tensor_parallel"])

    def _context_form(self) -> str:
        flag = self._word("--context-parallel-algo")
        if self.framework == "mindspeed":
            name = flag.text if flag else "ulysses_cp_algo"
            known = CONTEXT_ALGORITHMS
        else:
            flag = self._word("--cp-comm-type")
            name, known = (flag.values[0].text if flag else "p2p"), COMMUNICATION_TYPES
        if name not in known:
            text = f"{name} is priced as a ring: estimates know {', '.join(known)}"
            self.problems.add("note", text, flag.name if flag else "", flag.line if flag else None)
        return known.get(name, "ring")

    def _memory(self, model: ModelSpec) -> dict[str, Any]:
        """What is recomputed and offloaded, and by which optimizer in which formats."""
        given, problems = self.given, self.problems
        values = option_values(given, "layout", ParallelOptions, problems)
        names = {"recompute_granularity", "recompute_activations", "recompute_activation_function"}
        names |= {"recompute_modules", "recompute_method", "recompute_num_layers", "swap_attention"}
        names |= {"optimizer_cpu_offload", "num_distributed_optimizer_instances", "grad_reduce_in_bf16"}
        values = {name: value for name, value in values.items() if name in names}
        if self._is_given("--checkpoint-activations") and not values.get("recompute_granularity"):
            values |= {"recompute_granularity": "full", "recompute_method": "uniform"}
        self._leave_out_no_layers(values)
        self._leave_out_activations(values)
        self._price_modules(values)
        self._drop_idle(values)
        try:
            options = ParallelOptions(**values)
            pins = options.pins(model)
        except InputError as error:
            message = on_one_line(error)
            flag = blame(message, given)
            problems.add("illegal", message, flag.name if flag else "", flag.line if flag else None)
            return {}
        whole = self._recomputes_every_mlp(model)
        for text in [] if whole else options.notes():
            name = text.split()[0]
            problems.add(
                "note", text.removeprefix(name).strip(), name, given[name].line if name in given else None
            )
        found: dict[str, Any] = {
            name: value for name, value in pins.items() if not isinstance(value, WherePossible)
        }
        found |= self._mindspeeds_memory(found)
        if whole:
            found |= {"recompute": "selective", "recompute_modules": ("mlp",)}
        if self._is_given("--swap-optimizer", "--use-cpu-optimizer", "--cpu_torch_adam"):
            found["offload_optimizer"] = True
        if self._is_given("--fine-grained-activation-offloading"):
            found["offload_activations"] = True
        found["precision"] = self.precision()
        found["fp8_recipe"] = self._fp8_recipe()
        found["fp8_param_gather"] = self._gathers_fp8(found["fp8_recipe"])
        self._price_states()
        optimizer = self._word("--optimizer")
        if optimizer is not None:
            if optimizer.text not in OPTIMIZERS:
                text = f"{optimizer.text} is not priced: its states are taken for Adam's"
                problems.add("note", text, "--optimizer", optimizer.line)
            found["optimizer"] = OPTIMIZERS.get(optimizer.text, "adam")
        return found

    def _price_states(self) -> None:
        """Say which of the optimizer's numbers are smaller than those that are priced."""
        for name in ("--exp-avg-dtype", "--exp-avg-sq-dtype", "--main-grads-dtype", "--main-params-dtype"):
            flag = self._word(name)
            if flag is not None and flag.text != "fp32":
                self.memory_is_bound = True
                text = f"{flag.text} is priced as fp32, which takes more memory"
                self.problems.add("note", text, name, flag.line)

    def _leave_out_no_layers(self, values: dict[str, Any]) -> None:
        """Recompute nothing where no layers are recomputed (`--recompute-num-layers 0`)."""
        if values.get("recompute_num_layers") != 0 or values.get("recompute_method") == "uniform":
            return
        del values["recompute_num_layers"]
        if values.get("recompute_granularity") == "full":
            del values["recompute_granularity"]
            values.pop("recompute_method", None)

    def _leave_out_activations(self, values: dict[str, Any]) -> None:
        """MindSpeed recomputes activation functions of those layers that it does not recompute as a whole."""
        block = values.get("recompute_method") == "block" and values.get("recompute_granularity") == "full"
        name = "--recompute-activation-function"
        if (
            self.framework != "mindspeed"
            or not block
            or not values.pop("recompute_activation_function", None)
        ):
            return
        self.memory_is_bound = True
        text = "not priced beside whole layers: less is kept than the estimates say"
        self.problems.add("note", text, name, self.given[name].line)

    def _price_modules(self, values: dict[str, Any]) -> None:
        """Leave out modules of `--recompute-modules` that estimates do not know, and say so."""
        words = [word.strip() for given in values.get("recompute_modules", ()) for word in given.split(",")]
        left_out = [word for word in words if word in UNPRICED_MODULES]
        if words:
            # An MLP is what recomputes of a layer, be it dense or of experts.
            known = ["mlp" if word == "moe" else word for word in words if word not in left_out]
            values["recompute_modules"] = known
            if not known:
                values.pop("recompute_granularity", None)
        if left_out:
            self.memory_is_bound = True
            text = f"{', '.join(left_out)}: not priced as recomputed, and less is kept than the estimates say"
            self.problems.add("note", text, "--recompute-modules", self.given["--recompute-modules"].line)

    def _drop_idle(self, values: dict[str, Any]) -> None:
        """Leave out which layers are recomputed where nothing is: Megatron-LM looks at no more then."""
        if self.framework != "megatron" or any(
            values.get(name)
            for name in ("recompute_granularity", "recompute_activations", "recompute_activation_function")
        ):
            return
        for name in ("recompute_method", "recompute_num_layers"):
            if values.pop(name, None) is not None:
                flag = self.given[f"--{name.replace('_', '-')}"]
                text = "has no effect without --recompute-granularity"
                self.problems.add("note", text, flag.name, flag.line)

    def _recomputes_every_mlp(self, model: ModelSpec) -> bool:
        """Whether `--swap-attention --recompute-num-layers N` reaches all layers of a stage.

        Then nothing is left for `--recompute-activation-function`, which stands inside the MLP
        (MindSpeed, docs/zh/features/swap_attention.md).
        """
        if not self._is_given("--swap-attention") or not self._is_given("--recompute-activation-function"):
            return False
        flag = self._word("--recompute-num-layers")
        layers = None if flag is not None and flag.text == "0" else self.count("--recompute-num-layers")
        return layers is not None and layers >= -(
            -model.layers // (self.count(DEGREE_FLAGS["pipeline_parallel"]) or 1)
        )

    def _mindspeeds_memory(self, found: dict[str, Any]) -> dict[str, Any]:
        """MindSpeed's recomputation of activation functions and norms, of some layers or of all."""
        modules = list(found.get("recompute_modules", ()))
        if self._is_given("--recompute-norm"):
            modules.append("norm")
        ordered = tuple(name for name in get_args(RecomputeModule) if name in modules)
        changes: dict[str, Any] = {}
        if modules and found.get("recompute", "selective") == "selective":
            changes = {"recompute": "selective", "recompute_modules": ordered}
        for name in ("--recompute-activation-function-num-layers", "--recompute-norm-num-layers"):
            layers = self.count(name)
            if layers is not None and changes:
                changes |= {"recompute_method": "block", "recompute_num_layers": layers}
        return changes

    def _zero(self, replicas: int) -> int:
        if replicas == 1:
            return 0
        if self.framework == "megatron-deepspeed":
            return self._deepspeeds_zero()
        # Without Megatron-FSDP nothing looks at the strategy.
        strategy = self._word("--data-parallel-sharding-strategy")
        if strategy is not None and self._is_given("--use-megatron-fsdp", "--use-custom-fsdp"):
            return SHARDING.get(strategy.text, 0)
        if self._is_given("--use-torch-fsdp2"):
            return 2 if self._is_given("--torch-fsdp2-no-reshard-after-forward") else 3
        return int(self._is_given("--use-distributed-optimizer"))

    def _deepspeeds_zero(self) -> int:
        """The stage that DeepSpeed's file says, or `--zero-stage`, which scripts write into that file."""
        if self.deepspeed is not None:
            keys = Keyed(
                self.deepspeed.entries, "deepspeed", self.deepspeed.file, Problems(self.deepspeed.file)
            )
            return self._least_stage(deepspeed_config.zero_stage(keys))
        flag = self._word("--zero-stage")
        if flag is not None and flag.text in ("0", "1", "2", "3"):
            return self._least_stage(int(flag.text))
        config = self.given.get("--deepspeed_config") or self.given.get("--deepspeed-config")
        text = "says the stage of ZeRO, and is not given"
        name, line = (config.name, config.line) if config else ("--deepspeed_config", None)
        self.problems.add("unknown", text, name, line, "give that file beside this one")
        return 0

    def _least_stage(self, stage: int) -> int:
        """The stage that counts: of a pipeline in bf16 DeepSpeed splits the optimizer's state in any case.

        deepspeed/runtime/engine.py (`_do_optimizer_sanity_check`) and bf16_optimizer.py; without
        `--no-pipeline-parallel` the model is a pipeline, be it of one stage.
        """
        whole = self._is_given("--no-pipeline-parallel", "--no_pipeline_parallel")
        if stage or self.precision() != "bf16" or whole:
            return stage
        text = "0 with bf16: DeepSpeed's BF16_Optimizer splits its state as stage 1 does, and is priced so"
        flag = self.given.get("--zero-stage")
        self.problems.add("note", text, "--zero-stage", flag.line if flag else None)
        return 1


def blame_degree(message: str, given: Given) -> GivenFlag | None:
    """The flag, of those that are given, whose degree a message names first."""
    places = [
        (message.index(name), -len(name), flag)
        for name, flag in DEGREE_FLAGS.items()
        if name in message and flag in given
    ]
    return given[min(places)[2]] if places else None
