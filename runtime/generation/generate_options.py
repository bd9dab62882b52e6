"""Flags of `planner generate`."""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.errors import InputError
from costmodels.files import MIB, read_text
from planner.options.flags import flag
from planner.options.limits import AT_LEAST_1, Bounds, check_bounds

LARGEST_PROMPTS = 64 * MIB
"""Most bytes of a file of prompts."""

DTYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class GenerateOptions:
    """The model, the prompts, the choice of tokens, and the ranks."""

    load: str = flag(
        "",
        "Folder of checkpoints or of a Hugging Face model, or its id in the cache of the Hub.",
        "--load",
        "--model",
        metavar="FOLDER",
    )
    ckpt_step: int | None = flag(
        None,
        "Iteration of the checkpoint; the newest when not given.",
        within=Bounds("the iteration of a checkpoint", 0),
    )
    prompt: list[str] = flag([], "Text to continue; repeatable, and all texts are continued together.")
    prompt_file: str | None = flag(None, "File with one prompt a line.", metavar="FILE")
    max_new_tokens: int = flag(
        100,
        "Tokens to add to each prompt at most.",
        "--max-new-tokens",
        "--num-tokens-to-generate",
        within=AT_LEAST_1,
    )
    temperature: float | None = flag(
        None,
        "Divisor of the logits before a token is drawn; with 0, or without --temperature, --top-k and "
        "--top-p, the likeliest token is taken.",
        within=Bounds("0 (the likeliest token) or positive", 0),
    )
    top_k: int | None = flag(None, "Draw among the K likeliest tokens.", within=AT_LEAST_1)
    top_p: float | None = flag(
        None,
        "Draw among the likeliest tokens whose probabilities reach P.",
        within=Bounds("above 0 and at most 1", 0, 1, above=True),
    )
    seed: int = flag(
        1234,
        "Seed of the draws; each prompt has its own.",
        within=Bounds(f"a whole number from 0 to {2**63 - 1}", 0, 2**63 - 1),
    )
    ignore_eos: bool = flag(False, "Continue after the token that ends a text.")
    no_cache: bool = flag(False, "Compute all tokens anew for each one: slow, for comparisons.")
    no_special_tokens: bool = flag(
        False,
        "Leave out the tokens that a tokenizer.json puts before a text, such as Llama's <|begin_of_text|>.",
    )
    json: bool = flag(False, "Print one JSON object a prompt: prompt, text, tokens and why it ended.")
    tokenizer_type: str | None = flag(
        None,
        "GPT2BPETokenizer, HuggingFaceTokenizer or ByteTokenizer; the one beside the model when not given.",
    )
    vocab_file: str | None = flag(None, "GPT-2's vocab.json.")
    merge_file: str | None = flag(None, "GPT-2's merges.txt.")
    tokenizer_model: str | None = flag(
        None, "tokenizer.json of a Hugging Face tokenizer, its folder, or an id on the Hub."
    )
    dtype: str | None = flag(None, "fp32, bf16 or fp16; bf16 on GPUs and fp32 on a CPU when not given.")
    device: str | None = flag(None, "cpu: compute on the CPU of a machine with GPUs.")
    tensor_model_parallel_size: int = flag(
        1,
        "Ranks that share each matrix.",
        "--tensor-model-parallel-size",
        "--tensor-parallel-size",
        "--tp",
        within=AT_LEAST_1,
    )
    pipeline_model_parallel_size: int = flag(
        1,
        "Ranks that share the layers.",
        "--pipeline-model-parallel-size",
        "--pipeline-parallel-size",
        "--pp",
        within=AT_LEAST_1,
    )
    expert_model_parallel_size: int = flag(
        1, "Number of groups among which whole experts are distributed; the ranks of a group split each "
        "expert.",
        "--expert-model-parallel-size", "--ep", within=AT_LEAST_1,
    )  # fmt: skip
    context_parallel_size: int = flag(1, "Only 1.", "--context-parallel-size", hidden=True)
    data_parallel_size: int = flag(1, "Only 1.", "--data-parallel-size", hidden=True)

    @property
    def world_size(self) -> int:
        """Ranks that compute."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    def check(self) -> None:
        """Raise `InputError` for impossible values."""
        if not self.load:
            raise InputError("--load: none given: name a folder of checkpoints or of a Hugging Face model")
        for name in ("context_parallel_size", "data_parallel_size"):
            if getattr(self, name) != 1:
                raise InputError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: generation splits neither sequences "
                    "nor batches over ranks; give --tensor-model-parallel-size or "
                    "--pipeline-model-parallel-size"
                )
        check_bounds(self)
        if self.dtype not in (None, *DTYPES):
            raise InputError(f"--dtype {self.dtype}: expected {', '.join(DTYPES)}")
        if self.device not in (None, "cpu", "cuda", "npu", "xpu"):
            raise InputError(f"--device {self.device}: expected cpu, cuda, npu or xpu")

    def notes(self) -> list[str]:
        """Notes on sampling flags without effect, as no token is drawn."""
        names: tuple[str, ...]
        if self.temperature == 0:
            names, why = ("top_k", "top_p", "seed"), "--temperature 0 takes the likeliest token"
        elif (self.temperature, self.top_k, self.top_p) == (None, None, None):
            names, why = ("seed",), "nothing is drawn without --temperature, --top-k or --top-p"
        else:
            return []
        default = GenerateOptions()
        given = [
            f"--{name.replace('_', '-')}" for name in names if getattr(self, name) != getattr(default, name)
        ]
        return (
            [f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect: {why}"] if given else []
        )

    def prompts(self) -> list[str]:
        """The prompts; prompts of the file come last."""
        found = list(self.prompt)
        if self.prompt_file is not None:
            try:
                text = read_text(self.prompt_file, LARGEST_PROMPTS)
            except OSError as error:
                raise InputError(
                    f"--prompt-file {self.prompt_file}: cannot be read: {error.strerror}"
                ) from None
            except UnicodeDecodeError as error:
                raise InputError(
                    f"--prompt-file {self.prompt_file}: not UTF-8 text: byte {error.start}"
                ) from None
            found += [line for line in text.splitlines() if line.strip()]
        if not found:
            raise InputError("no prompt: give --prompt TEXT, or --prompt-file FILE with one a line")
        return found
