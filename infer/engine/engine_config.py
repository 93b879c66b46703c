"""What an engine is made with."""

from dataclasses import dataclass
from typing import Literal, get_args

from dflash_jax.decoding.choice import Proposals
from dflash_jax.infer.engine.graphs import Policy as Graphs
from dflash_jax.infer.engine.params import check_seed

MOST_NODES = 1024  # of a tree


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. Except for `seed` and `max_length`, none of them changes an answer in float32.

    Attributes:
        slots: maximum number of concurrent sequences (rows of the batch).
        max_length: maximum number of tokens of a sequence, prompt and answer together.
        block_size: tokens that a step verifies, the draft length plus 1; at most that of the checkpoint, which is the
            default. 1 is decoding without speculation, except with a drafter that predicts at the anchor, too, which
            then proposes one token. "auto" chooses a size for every device call, 1 included, by measured step times and
            acceptance.
        tree: number of nodes of the draft tree to verify; 0 verifies a chain. "auto", the default where the block size
            is "auto", chooses among chains and trees.
        verify_budget: positions to verify in a step, per sequence on average, the anchor among them. Those of all
            sequences that are likeliest to be reached are verified, so that sequences with a confident drafter get
            more. With a block size of "auto" it is one more candidate. None verifies all that is proposed; "auto" on a
            GPU or TPU then chooses among some budgets, too, from 32 sequences on.
        proposals: how draft tokens are sampled at a temperature above 0: "calibrated", "coupled", "argmax" or
            "independent" (docs/sampling.md).
        seed: random seed of requests that name none.
        prefill_chunk: maximum number of prompt tokens that one program reads, of one prompt or of several together.
        prefill_budget: prompt tokens of other sequences that a decoding step also reads, in the same pass (chunked
            prefill): between two steps no more are read, of at most four prompts, and of each at most a chunk. None
            reads prompts between device calls. "auto" is None on CPU, with one slot and with `deterministic`; elsewhere
            a chunk, if `warm_up` measures that this is faster than one after the other.
        steps_per_visit: maximum number of decoding steps in a device call.
        prefix_chunks: size of the prefix cache in chunks; each takes the KV cache memory of `prefill_chunk` tokens.
        logprobs: maximum number of alternatives per token whose log-probabilities a request may ask for; None allows
            no log-probabilities.
        sampled_logprobs: whether requests that ask for log-probabilities also get those in the distribution that their
            tokens are sampled from (`Completion.sampled_logprobs`); needs `logprobs`.
        keep_features: whether completions have the target's features that the drafter was given
            (`Completion.features`), for a drafter that learns from answers. They take the memory of `slots` sequences
            of `max_length` positions, and cannot be combined with `cache_tokens` and `draft_window`.
        cache_tokens: size of the KV cache in tokens, which all sequences share in pages: each takes what its tokens
            need, so that a large `max_length` costs next to nothing. None gives every sequence room for `max_length`.
            If the pages run out, the request that came last is preempted: it gives its pages back and waits, and what
            it has so far is read again later. Recurrent states and the rings of sliding windows are not in pages.
        cache_dtype: "int8" keeps the target's KV cache in 8 bits, with a scale for each token and head. Answers are
            then those of autoregressive decoding with such a cache. None is the dtype of the parameters.
        draft_window: window of the drafter's attention in tokens, besides the first page of a sequence (128), so that
            its cache stops growing. It changes proposals only. None is all.
        plain: whether requests may ask for decoding without speculation, or for smaller blocks than a fixed block size
            (`Request.max_block_size`).
        deterministic: bitwise reproducible answers: nothing is chosen by measured times, and lengths are fixed, so that
            the bits of an answer depend only on its request, target, drafter, `block_size`, `tree`, `proposals`,
            `draft_window`, `slots`, `max_length`, `prefill_chunk`, the dtype, the mesh and the kind of device. On CPU
            they do not depend on `max_length` either. "auto" is then the checkpoint's block size, and no tree.
        gpu_graphs: whether all steps of a device call run as one CUDA graph: "on", "off", or "auto", which is on where
            one device decodes, its driver is of CUDA 12.4 or later, and a small program at the first use is right.
        constraints: whether requests may have a constraint (`SamplingParams.constraint`). If not, programs have no part
            for them.
        constraint_states: maximum number of automaton states of all constraints in use. Their tables take some memory:
            about 75 MB with the default and a vocabulary of 150,000.

    Raises:
        ValueError: a setting out of range, or two that cannot be combined.
    """

    slots: int = 1
    max_length: int = 2048
    block_size: int | Literal["auto"] | None = None
    tree: int | Literal["auto"] | None = None
    verify_budget: int | None = None
    proposals: Proposals = "calibrated"
    seed: int = 0
    prefill_chunk: int = 256
    prefill_budget: int | Literal["auto"] | None = None
    steps_per_visit: int = 16
    prefix_chunks: int = 0
    logprobs: int | None = None
    sampled_logprobs: bool = False
    keep_features: bool = False
    cache_tokens: int | None = None
    cache_dtype: Literal["int8"] | None = None
    draft_window: int | None = None
    plain: bool = False
    deterministic: bool = False
    gpu_graphs: Graphs = "auto"
    constraints: bool = False
    constraint_states: int = 2**14

    def __post_init__(self):
        least = {"slots": 1, "max_length": 1, "prefill_chunk": 1, "steps_per_visit": 1, "prefix_chunks": 0}
        least["constraint_states"] = 64
        for name, smallest in least.items():
            if not smallest <= (value := getattr(self, name)) < 2**31:
                raise ValueError(f"{name} must be at least {smallest} and below 2**31, got {value}")
        check_seed(self.seed)
        if self.constraint_states >= 2**15:
            raise ValueError(f"constraint_states must be below 2**15, got {self.constraint_states}")
        if self.tree == "auto" and self.block_size != "auto":
            raise ValueError('tree "auto" goes together with block_size "auto"; give both, or a number of nodes')
        if isinstance(self.tree, int) and not 0 <= self.tree <= MOST_NODES:
            raise ValueError(f"tree must lie in 0..{MOST_NODES} nodes, got {self.tree}; 0 is a chain")
        if self.sampled_logprobs and self.logprobs is None:
            raise ValueError("sampled_logprobs come with log-probabilities; set logprobs, to 0 or more")
        if self.keep_features and (self.cache_tokens is not None or self.draft_window is not None):
            raise ValueError("keep_features cannot be combined with cache_tokens and draft_window")
        if self.cache_dtype not in (None, "int8"):
            raise ValueError(f'cache_dtype must be "int8" or None, got {self.cache_dtype!r}')
        if self.draft_window is not None and not 1 <= self.draft_window < 2**31:
            raise ValueError(f"draft_window must be at least 1 and below 2**31, got {self.draft_window}")
        if self.verify_budget is not None and self.verify_budget < 2:
            raise ValueError(f"verify_budget must be at least 2, got {self.verify_budget}; the anchor is one position")
        if self.verify_budget is not None and self.deterministic:
            raise ValueError(
                "verify_budget and deterministic cannot be combined: what is verified depends on all sequences"
            )
        if isinstance(self.prefill_budget, int) and not 1 <= self.prefill_budget < 2**31:
            raise ValueError(f"prefill_budget must be at least 1 and below 2**31, got {self.prefill_budget}")
        if isinstance(self.prefill_budget, int) and self.deterministic:
            raise ValueError(
                "prefill_budget and deterministic cannot be combined: what a step reads depends on all sequences"
            )
        if self.plain and self.deterministic:
            raise ValueError(
                "plain and deterministic cannot be combined: one request without speculation changes the steps of all"
            )
        if self.proposals not in get_args(Proposals):
            raise ValueError(f"proposals must be one of {', '.join(get_args(Proposals))}; got {self.proposals!r}")
        if self.gpu_graphs not in get_args(Graphs):
            raise ValueError(f"gpu_graphs must be one of {', '.join(get_args(Graphs))}; got {self.gpu_graphs!r}")

    def check(self, vocab_size: int, parts: int) -> None:
        """Raises ValueError for settings that a target of so many tokens cannot have, whose mesh has so many parts of
        rows."""
        if self.logprobs is not None and not 0 <= self.logprobs <= vocab_size:
            raise ValueError(f"logprobs must lie in 0..{vocab_size} or be None, got {self.logprobs}")
        if self.slots % parts:
            raise ValueError(
                f"slots must be a multiple of {parts}, the data-parallel parts of the mesh; got {self.slots}"
            )
        if isinstance(self.prefill_budget, int) and self.prefill_budget < parts:
            raise ValueError(f"prefill_budget must be at least {parts}, one for each data-parallel part of the mesh")
        if self.cache_tokens is not None and self.cache_tokens < (least := parts * self.max_length):
            raise ValueError(f"cache_tokens must be at least {least}, for the longest request; got {self.cache_tokens}")

    def beside(self, backend: str) -> int | None:
        """Tokens of prompts that a step reads beside rows that decode, on such devices; None reads none."""
        if self.prefill_budget != "auto":
            return self.prefill_budget
        return None if backend == "cpu" or self.slots == 1 or self.deterministic else self.prefill_chunk
