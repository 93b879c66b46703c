"""New drafters for a target, and drafters as Hugging Face directories (names of method, section 7.3)."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from dflash_jax import checkpoint, files
from dflash_jax.checkpoint import flat, leaves, nested
from dflash_jax.config import AttentionConfig, Raw, RopeConfig
from dflash_jax.config_json import token_ids
from dflash_jax.drafters import KINDS, drafter_config, kind_named, kind_of, kind_with
from dflash_jax.drafters.base import Drafter
from dflash_jax.drafters.config import DFlashConfig
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.drafters.speculators import as_speculators
from dflash_jax.infer.text import Text
from dflash_jax.mesh import entered, gather
from dflash_jax.sharding import lookup
from dflash_jax.target import Target
from dflash_jax.train.card import TARGET
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.data import Example

INIT_STD = 0.02


def new_drafter(
    target: Target, config: TrainConfig, mask_token_id: int, vocabulary: Sequence[int] | None = None
) -> tuple[Drafter, dict[str, Any]]:
    """A freshly initialized drafter of the kind `config.drafter` in the target's shape, and its `config.json`.

    Matrices are drawn from N(0, 0.02) by `config.seed`, norms are one, biases zero, unless the kind says otherwise.

    Args:
        vocabulary: tokens that it can propose, ascending; None is all. Their rows of the target's head are its own.

    Raises:
        ValueError: taps the target does not have, or a mask token outside the vocabulary.
    """
    c, layer, kind = target.config, target.config.layers[-1], kind_named(config.drafter)
    attention = next(each.attention for each in reversed(c.layers) if isinstance(each.mixer, AttentionConfig))
    common: dict[str, Any] = {
        "model_type": "qwen3",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": INIT_STD,
        "layer_types": ["full_attention"] * config.num_layers,
        "max_position_embeddings": c.max_position_embeddings,
        "tie_word_embeddings": True,
        "use_cache": True,
        "block_size": config.block_size,
        "num_target_layers": c.num_hidden_layers,
        "dflash_config": {"mask_token_id": mask_token_id},
        **(_rope_fields(attention.rope) if attention.rope else {}),
    }
    given: dict[str, Any] = {}
    if vocabulary is not None:
        common["draft_vocab_size"] = len(vocabulary)
        ids = np.asarray(vocabulary, np.int32)
        given = {"d2t": ids - np.arange(len(ids), dtype=np.int32), "lm_head": _head_rows(target, ids)}
    return _made(target, config, dict(kind.new_config(common, config.kind_settings, config.target_layer_ids)), given)


def _head_rows(target: Target, ids: np.ndarray) -> np.ndarray:
    """Rows of the target's head, in float32; nothing else of it is touched."""
    head = target.params["embed_tokens" if target.config.tie_word_embeddings else "lm_head"]
    with entered(target.mesh):
        return gather(lookup(head, jnp.asarray(ids)[None])[0]).astype(np.float32)


def _made(
    target: Target, config: TrainConfig, raw: dict[str, Any], given: Mapping[str, Any]
) -> tuple[Drafter, dict[str, Any]]:
    """A drafter with this `config.json`, and new parameters but for those that are given by their paths."""
    own = {"own_embedding": "embed_tokens" in given, "own_head": "lm_head" in given, "own_vocabulary": "d2t" in given}
    kind = KINDS[kind_of(raw)]
    parsed = dataclasses.replace(drafter_config(raw), **own)
    parsed.check_pair(target.config)
    rng = np.random.default_rng(config.seed)
    params: dict[str, Any] = {}
    table = kind.tensors(parsed)
    for path, leaf in leaves(table):
        if path in given:
            value = given[path]
        elif (value := kind.initial(path, leaf.shape, parsed)) is not None:
            pass
        elif "norm" in path or "bias" in path:
            value = np.full(leaf.shape, "norm" in path, np.float32)
        else:
            value = rng.standard_normal(leaf.shape, np.float32) * np.float32(INIT_STD)
        params[path] = jnp.asarray(value)
    return kind.drafter(nested(params, table, jnp.float32), parsed), raw


def converted(
    target: Target, started: Drafter, raw: dict[str, Any], config: TrainConfig
) -> tuple[Drafter, dict[str, Any]]:
    """A drafter as one of the kind `config.drafter`, whose further parameters are new.

    Raises:
        ValueError: a drafter of that kind cannot begin as this one.
    """
    found = kind_of(raw)
    if found == config.drafter:
        return started, raw
    converted_raw = kind_named(config.drafter).config_from(started.config, raw, config.kind_settings)
    if converted_raw is None:
        raise ValueError(f"--init-from: a {found} drafter cannot become a {config.drafter} one")
    return _made(target, config, dict(converted_raw), flat(started.params))


def frequent_tokens(examples: Sequence[Example], size: int) -> list[int] | None:
    """The most frequent tokens of the answers, ascending; None where `size` is 0: all.

    Raises:
        ValueError: the answers have fewer.
    """
    if size == 0:
        return None
    answers = np.concatenate([example.tokens[example.supervised.astype(bool)] for example in examples])
    counts = np.bincount(answers)
    if (most := int(np.count_nonzero(counts))) < size:
        raise ValueError(f"draft_vocab_size must be at most {most}, the different tokens of the answers, got {size}")
    return sorted(np.argsort(-counts, kind="stable")[:size].tolist())


def _rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """Rotary settings in the new spelling and the old one; a drafter rotates whole heads, whatever its target does."""
    if rope.kind == "proportional":
        rope = RopeConfig(rope.theta)
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    for field in dataclasses.fields(rope):
        value = getattr(rope, field.name)
        if field.name not in ("theta", "kind", "rotated") and value != field.default:
            scaling[field.name] = value
    if rope.kind != "default":
        scaling["factor"] = rope.factor
    return {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
        "rope_parameters": {"rope_theta": rope.theta, **scaling},
    }


def choose_mask_token(target: Target, token: int | None) -> int:
    """The token of masked slots: the given one, the tokenizer's mask token, or an embedding row no token uses.

    Raises:
        ValueError: it is the pad or an end token, outside the vocabulary, or there is no free row.
    """
    text = Text(target.directory) if target.directory else None
    forbidden = set(target.config.eos_token_ids) | (text.reserved_tokens if text else set())
    for name in ("config.json", "generation_config.json"):
        path = Path(target.directory) / name
        if target.directory and path.is_file():
            raw = checkpoint.read_json(path)
            forbidden |= {i for end in ("pad_token_id", "eos_token_id") for i in token_ids(raw.get(end), str(path))}
    size = target.config.vocab_size
    if token is None and text is not None:
        token = text.mask_token
    if token is None:
        taken = text.used_tokens if text else set()
        token = next((i for i in range(size - 1, -1, -1) if i not in taken | forbidden), None)
        if token is None or not taken:
            raise ValueError(
                "the tokenizer has no mask token and leaves no embedding row unused (or there is no tokenizer); "
                "set mask_token_id to a token that never occurs"
            )
    if not 0 <= token < size or token in forbidden:
        raise ValueError(f"mask_token_id {token} must lie in 0..{size - 1} and be neither pad nor end token")
    return token


def cast(params: Any, dtype: DTypeLike) -> Any:
    """The parameters in the dtype of the computation; integers stay."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)


def with_block_size(drafter: Drafter, raw: dict[str, Any], block_size: int) -> tuple[Drafter, dict[str, Any]]:
    """The drafter and its `config.json` for blocks of this size, at most its own."""
    own = drafter.config.block_size
    if block_size > own:
        raise ValueError(f"block_size {block_size} is above the drafter's {own}; lower it")
    inside = dict(raw.get("dflash_config") or {})
    inside.pop("block_size", None)
    raw = raw | ({"ttt_length": block_size - 1} if "ttt_length" in raw else {"block_size": block_size})
    raw |= {"dflash_config": inside} if inside else {}
    return kind_with(drafter).for_blocks(drafter, block_size), raw


def store_sharpness(directory: Path, sharpness: Sequence[float]) -> None:
    """Writes into the `config.json` of a drafter where the calibration of its proposals begins.

    Raises:
        ValueError: there is nothing to write, since no proposal was right.
    """
    if not sharpness:
        raise ValueError("no draft token was accepted, so no sharpness was learned; use more prompts")
    path = directory / "config.json"
    raw = checkpoint.read_json(path)
    for inside in ("dflash_config", "eagle_config"):
        if isinstance(raw.get(inside), dict):
            raw[inside].pop("proposal_sharpness", None)
    files.write_json(path, raw | {"proposal_sharpness": list(sharpness)})


def save_drafter(directory: str | Path, drafter: Drafter, raw: Raw, dtype: DTypeLike | None = None) -> None:
    """Writes `config.json` and `model.safetensors`, in float32 unless another `dtype` is asked for.

    The directory appears whole or not at all: it is written beside and renamed.
    """
    _write(directory, drafter.params, KINDS[kind_of(raw)].tensors(drafter.config), raw, dtype)


def save_speculators(directory: str | Path, drafter: Drafter, raw: Raw, dtype: DTypeLike | None = None) -> None:
    """The same of a DFlash drafter in the layout of the `speculators` library.

    Raises:
        ValueError: that layout cannot say what this drafter is.
    """
    config = drafter.config
    if not isinstance(config, DFlashConfig) or kind_of(raw) != "dflash":
        raise ValueError(f"--format speculators is for dflash drafters, and this is a {kind_of(raw)} one")
    reduced = config.draft_vocab_size != config.vocab_size
    if config.own_embedding or (config.own_head and not reduced):
        raise ValueError("--format speculators is for drafters that share the target's embedding and head")
    target = raw.get(TARGET)
    described = Path(str(target)) / "config.json"
    architectures = checkpoint.read_json(described).get("architectures") if described.is_file() else None
    made = as_speculators(raw, config, target, architectures or ())
    found, expected = (
        dataclasses.replace(each, own_embedding=False, own_head=False, own_vocabulary=False)
        for each in (drafter_config(made), config)
    )
    if differ := [f.name for f in dataclasses.fields(config) if getattr(found, f.name) != getattr(expected, f.name)]:
        raise ValueError(f"--format speculators cannot say this drafter's {', '.join(differ)}; leave --format out")
    params, table = dict(drafter.params), DFlash().tensors(config)
    if reduced:  # the library also wants the tokens' places the other way round
        chosen = np.asarray(params["d2t"], np.int64) + np.arange(config.draft_vocab_size)
        params |= {"d2t": chosen - np.arange(len(chosen)), "t2d": np.isin(np.arange(config.vocab_size), chosen)}
        table |= {"t2d": checkpoint.copied("t2d", config.vocab_size)}
    _write(directory, params, table, made, dtype)


def _write(
    directory: str | Path,
    params: PyTree,
    table: checkpoint.Table,
    raw: Raw,
    dtype: DTypeLike | None,
) -> None:
    dtype = jnp.dtype(dtype or jnp.float32)
    host = jax.tree.map(lambda x: x if isinstance(x, np.ndarray) else np.asarray(x), cast(params, dtype))
    with files.replacing(Path(directory)) as beside:
        checkpoint.save(beside, host, table, {**raw, "dtype": dtype.name})
