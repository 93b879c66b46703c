"""`spec_generate` and `generate`: batches of prompts in, tokens out."""

import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from dflash_jax.decoding.choice import Proposals
from dflash_jax.decoding.state import DraftModel, State, init_state
from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.engine_config import EngineConfig
from dflash_jax.infer.engine.params import STOP_WIDTH, SamplingParams
from dflash_jax.infer.engine.programs import prefill
from dflash_jax.infer.engine.requests import Request
from dflash_jax.infer.text import Text
from dflash_jax.mesh import entered, rows_of
from dflash_jax.sharding import pin
from dflash_jax.target import Target

Message = Mapping[str, Any]
Prompts = (
    str | Sequence[str | Message | Sequence[Message]] | Sequence[int] | Sequence[Sequence[int]] | np.ndarray | jax.Array
)


class Generation(NamedTuple):
    """Answers of a batch, in its order.

    Attributes:
        tokens: generated tokens of each sequence, the stop token included, the prompt not.
        acceptance_lengths: tokens that each step accepted, of each sequence; empty without speculation. The first
            token of a sequence comes from its prefill and belongs to no step.
        finish_reasons: "stop" or "length", of each sequence.
        texts: the answers as text, if prompts were strings or messages; else empty.
        seconds: how long all of it took, with the compilation of programs that were not compiled before.
    """

    tokens: list[list[int]]
    acceptance_lengths: list[list[int]]
    finish_reasons: list[str]
    texts: Sequence[str] = ()
    seconds: float = 0.0

    def __eq__(self, other: object) -> bool:
        """Whether the answers are the same, however long they took."""
        return self[:-1] == other[:-1] if isinstance(other, Generation) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @property
    def steps(self) -> list[int]:
        """Steps with speculation that each answer took."""
        return [len(lengths) for lengths in self.acceptance_lengths]


def spec_generate(
    target: Target,
    drafter: DraftModel | None,
    input_ids: Prompts,
    *,
    max_new_tokens: int,
    seed: int = 0,
    stop_token_ids: Sequence[int] | None = None,
    ignore_eos: bool = False,
    block_size: int | Literal["auto"] | None = None,
    tree: int | Literal["auto"] | None = None,
    proposals: Proposals = "calibrated",
    max_length: int | None = None,
    prefill_chunk: int = 256,
    **sampling: Any,
) -> Generation:
    """Generates with speculation. In float32 the tokens are those of `generate` with the same arguments, up to ties; in
    bfloat16 and float16 they may differ by rounding (docs/sampling.md).

    Args:
        target, drafter: a pair from `load_target` and `load_drafter`.
        input_ids: one prompt or a batch of prompts: token ids (ragged lists or an array [B, P]), strings, or
            conversations, lists of {"role", "content"}. A string is a user's turn if the target has a chat template,
            else a text to continue; `Text` makes token ids in any other way.
        max_new_tokens: maximum number of tokens of an answer.
        seed: random seed; answer i depends on this seed and i alone.
        stop_token_ids: tokens that end an answer; None takes the checkpoint's, an empty list none.
        ignore_eos: the checkpoint's end tokens do not end an answer; those of `stop_token_ids` do.
        block_size, tree, proposals, prefill_chunk: see `EngineConfig`.
        max_length: KV cache size of a sequence in tokens; by default what the longest one needs, rounded up so that
            similar calls share compiled programs.
        sampling: other fields of `SamplingParams`: temperature (0, the default, is greedy), top_p, top_k, min_p,
            repetition_penalty, presence_penalty, frequency_penalty, min_tokens, constraint.

    Raises:
        TypeError: an unknown argument.
        ValueError: a drafter for another target, or an argument out of range.
    """
    begin = time.perf_counter()
    prompts, text = _tokens_of(target, input_ids)
    if max_length is None:
        longest = max((len(prompt) for prompt in prompts), default=0) + max(max_new_tokens, 0)
        max_length = -(-max(longest, 1) // 256) * 256
    stops = {"eos_token_ids": target.config.eos_token_ids, "ignore_eos": ignore_eos}
    if stop_token_ids is not None:
        stops = {"stop_token_ids": tuple(stop_token_ids)}
    params = SamplingParams(max_new_tokens, **stops, **sampling)
    parts = rows_of(target.mesh)
    config = EngineConfig(
        slots=-(-max(len(prompts), 1) // parts) * parts,
        max_length=max_length,
        block_size=block_size,
        tree=tree,
        proposals=proposals,
        seed=seed,
        prefill_chunk=prefill_chunk,
        constraints=params.constraint is not None,
    )
    requests = [Request(prompt, params, id=str(row)) for row, prompt in enumerate(prompts)]
    done = Engine(target, drafter, config).generate(requests)
    return Generation(
        [completion.token_ids for completion in done],
        [completion.acceptance_lengths for completion in done],
        [completion.finish_reason for completion in done],
        [text.answer(completion.token_ids) or "" for completion in done] if text is not None else (),
        time.perf_counter() - begin,
    )


def generate(target: Target, input_ids: Prompts, *, max_new_tokens: int, **settings: Any) -> Generation:
    """Autoregressive decoding: `spec_generate` without a drafter, with the same arguments."""
    return spec_generate(target, None, input_ids, max_new_tokens=max_new_tokens, **settings)


def begin_decoding(
    target: Target,
    drafter: DraftModel | None,
    input_ids: Prompts,
    params: SamplingParams | None = None,
    *,
    seed: int = 0,
    max_length: int = 2048,
) -> tuple[State, list[int]]:
    """Prefills the prompts, one per sequence, and returns the decoding state for your own loop over `speculative_step`.

    Args:
        drafter: not checked here: call `drafter.config.check_pair(target.config)` first.
        input_ids: see `spec_generate`; all are read in one pass.
        params: settings of every sequence; None is greedy, without tokens that end an answer.
        seed: random seed; answer i depends on this seed and i alone, as in `spec_generate`.
        max_length: maximum number of tokens of a sequence.

    Returns:
        The state, and the first new token of each row, which is its anchor and belongs to no step.

    Raises:
        ValueError: no prompts, an empty one, one that a row cannot hold, or a setting out of range.
    """
    (prompts, _), params = _tokens_of(target, input_ids), params or SamplingParams()
    params.check()
    longest, rows = max(map(len, prompts), default=0), len(prompts)
    if not all(prompts) or not prompts or longest >= max_length:
        raise ValueError(f"every prompt must have 1 to {max_length - 1} tokens, got {sorted(map(len, prompts))}")
    settings = [
        params.on_device(str(row), 0, seed, min(params.max_new_tokens, max_length - len(prompt)))
        for row, prompt in enumerate(prompts)
    ]
    tokens = np.zeros((rows, longest), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    counts = np.asarray([len(prompt) for prompt in prompts], np.int32)
    with entered(target.mesh):
        state = pin(init_state(target, drafter, rows, max_length, STOP_WIDTH, longest))
        read = np.arange(rows, dtype=np.int32), tokens, counts, np.ones(rows, np.bool_), tuple(settings)
        state, first = prefill(target, drafter, state, *read)
    return state, first.tokens[:, 0].tolist()


def _tokens_of(target: Target, prompts: Prompts) -> tuple[list[list[int]], Text | None]:
    """Token ids of every prompt; and the tokenizer, if they were words."""
    if isinstance(prompts, Mapping):
        raise ValueError("a message stands in a list: [{'role': 'user', 'content': ...}]")
    one = isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Mapping))
    every: Any = [prompts] if one else prompts
    in_words = lambda prompt: (
        isinstance(prompt, str) or (isinstance(prompt, list | tuple) and isinstance(next(iter(prompt), None), Mapping))
    )
    if not any(words := [in_words(prompt) for prompt in every]):
        return _prompts(prompts), None
    if not all(words):
        raise ValueError("prompts of a batch must all be token ids, or all strings and lists of messages")
    text = _text_of(target.directory)
    return [_encoded(text, prompt) for prompt in every], text


@lru_cache(maxsize=4)
def _text_of(directory: str) -> Text:
    if not directory:
        raise ValueError("the target was not loaded from a directory, and has no tokenizer; give token ids")
    return Text(directory)


def _encoded(text: Text, prompt: str | Sequence[Message]) -> list[int]:
    if not isinstance(prompt, str):
        return text.encode_chat(prompt)
    if text.has_chat_template:
        return text.encode_chat([{"role": "user", "content": prompt}])
    return text.encode(prompt)


def _prompts(input_ids: Prompts) -> list[list[int]]:
    rows: Any = input_ids.tolist() if isinstance(input_ids, np.ndarray | jax.Array) else list(input_ids)
    if rows and not isinstance(rows[0], list | tuple | np.ndarray | jax.Array):
        rows = [rows]
    return [[int(token) for token in row] for row in rows]
