"""Safetensors on disk <-> parameters in device memory, one tensor at a time, by a declarative table.

A `Table` maps a parameter's path to a `Leaf`: the checkpoint tensors it is assembled from, and where
each goes. Loading fuses along it, saving takes it backwards. Weights keep torch's [out, in] layout.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dflash_jax.config import DecoderConfig

_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Part:
    """Rows of one checkpoint tensor inside a parameter: `parameter[index] = tensor[rows]`.

    Attributes:
        shape: of the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[int | slice, ...]
    rows: slice


@dataclass(frozen=True)
class Leaf:
    """One parameter and the checkpoint tensors it is made of."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]


Table = dict[str, Leaf]


def copied(name: str, *shape: int) -> Leaf:
    """A tensor taken as it is."""
    whole = tuple(slice(0, size) for size in shape)
    return Leaf(shape, (Part(name, shape, whole, whole[0]),))


def fused(outputs: Sequence[tuple[str, int]], *rest: int, shards: int = 1, copies: Mapping[str, int] = {}) -> Leaf:
    """Tensors `(name, size)` of shape [size, *rest] one after another along the first axis.

    In `shards` parts: the first holds the first part of each tensor, and so on, so that a device that holds one part
    holds rows of every tensor. A tensor with `copies` is there so many times: that many shards in a row hold the same.
    """
    parts, start = [], 0
    for shard in range(shards):
        for name, size in outputs:
            times = copies.get(name, 1)
            count = size * times // shards
            first = shard // times * count
            index = slice(start, start + count), *(slice(0, n) for n in rest)
            parts.append(Part(name, (size, *rest), index, slice(first, first + count)))
            start += count
    return Leaf((start, *rest), tuple(parts))


def stacked(leaves: Sequence[Leaf]) -> Leaf:
    """Leaves of one shape along a new first axis."""
    parts = tuple(replace(part, index=(i, *part.index)) for i, leaf in enumerate(leaves) for part in leaf.parts)
    return Leaf((len(leaves), *leaves[0].shape), parts)


def decoder_layer(config: DecoderConfig, path: str, prefix: str, *, fuse_qkv: bool) -> Table:
    """A pre-norm decoder layer; without `fuse_qkv`, keys, values and their norm live elsewhere."""
    D, inner, H, shards = config.hidden_size, config.intermediate_size, config.head_dim, config.shards
    queries, keys = config.num_attention_heads * H, config.num_key_value_heads // config.key_value_copies * H
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    heads = [(f"{attention}.q_proj", queries)]
    if fuse_qkv:
        heads += [(f"{attention}.k_proj", keys), (f"{attention}.v_proj", keys)]
    projection = "qkv_proj" if fuse_qkv else "q_proj"
    copies = {f"{attention}.{x}_proj.{kind}": config.key_value_copies for x in "kv" for kind in ("weight", "bias")}

    def each(names: list[tuple[str, int]], kind: str) -> list[tuple[str, int]]:
        return [(f"{name}.{kind}", size) for name, size in names]

    gate_up = [(f"{mlp}.gate_proj.weight", inner), (f"{mlp}.up_proj.weight", inner)]
    table = {
        "input_layernorm/weight": copied(f"{prefix}.input_layernorm.weight", D),
        "post_attention_layernorm/weight": copied(f"{prefix}.post_attention_layernorm.weight", D),
        "self_attn/q_norm/weight": copied(f"{attention}.q_norm.weight", H),
        f"self_attn/{projection}/weight": fused(each(heads, "weight"), D, shards=shards, copies=copies),
        "self_attn/o_proj/weight": copied(f"{attention}.o_proj.weight", D, queries),
        "mlp/gate_up_proj/weight": fused(gate_up, D, shards=shards),
        "mlp/down_proj/weight": copied(f"{mlp}.down_proj.weight", D, inner),
    }
    if fuse_qkv:
        table["self_attn/k_norm/weight"] = copied(f"{attention}.k_norm.weight", H)
    if config.attention_bias:
        table[f"self_attn/{projection}/bias"] = fused(each(heads, "bias"), shards=shards, copies=copies)
        table["self_attn/o_proj/bias"] = copied(f"{attention}.o_proj.bias", D)
    return {f"{path}/{name}": leaf for name, leaf in table.items()}


# --------------------------------------------------------------------------------------------------
# Directories


def resolve(source: str | Path, what: str) -> Path:
    """A local checkpoint directory, downloaded from the hub if `source` is a hub id.

    Raises:
        ValueError: neither a directory nor a repository that can be downloaded.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists() or str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
        raise ValueError(f"{what} must be a checkpoint directory or a hub id 'owner/name', got {source!s}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        return Path(snapshot_download(str(source), allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{what} {source!s} is no local directory and could not be fetched from the hub: {reason}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; raises ValueError naming the file if there is none."""
    if not path.is_file():
        raise ValueError(f"{path.parent} must hold {path.name}, found none; is this a checkpoint directory?")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(raw).__name__}")
    return raw


class Reader:
    """The safetensors files of one checkpoint directory: names and shapes now, tensors on demand."""

    def __init__(self, directory: Path, rename: Callable[[str], str] = lambda name: name):
        self.directory = directory
        self._files = {path.name: _open(path) for path in self._paths()}
        self._tensors = {
            rename(name): (handle, name, path)
            for path, handle in self._files.items()
            for name in handle.keys()  # noqa: SIM118 (no dict)
        }

    def _paths(self) -> list[Path]:
        index, single = self.directory / "model.safetensors.index.json", self.directory / "model.safetensors"
        if not index.is_file():
            if not single.is_file():
                raise ValueError(f"{self.directory} must hold model.safetensors or its index, found neither")
            return [single]
        files = read_json(index).get("weight_map")
        if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
            raise ValueError(f"{index} must have a weight_map from tensor names to file names")
        paths = [self.directory / name for name in sorted(set(files.values()))]
        if absent := [path.name for path in paths if not path.is_file()]:
            raise ValueError(f"{index} names files that are missing: {', '.join(absent)}; download them again")
        return paths

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        handle, stored, _ = self._tensors[name]
        return tuple(handle.get_slice(stored).get_shape())

    def dtype(self, name: str) -> str:
        handle, stored, _ = self._tensors[name]
        return handle.get_slice(stored).get_dtype()

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of a tensor; nothing else of it is read."""
        handle, stored, _ = self._tensors[name]
        return handle.get_slice(stored)[index]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no complete safetensors file ({error}); download it again") from error


def load(
    reader: Reader,
    table: Table,
    dtype: Any,
    *,
    ignored: tuple[str, ...] = (),
    place: Callable[[str, tuple[int, ...]], jax.sharding.Sharding | None] = lambda path, shape: None,
) -> dict[str, Any]:
    """Reads every parameter of `table` as a nested dict of device arrays of `dtype`.

    Args:
        ignored: endings of tensor names that may be there without use.
        place: the sharding of a parameter by its path and shape. Each shard goes from the file to its device; only
            one is on the host at a time.

    Raises:
        ValueError: one message listing every missing, unexpected and misshapen tensor.
    """
    _check(reader, table, ignored)
    params: dict[str, Any] = {}
    for path, leaf in table.items():
        sharding = place(path, leaf.shape)
        if sharding is None:
            value = jax.device_put(_assemble(reader, leaf, (slice(None),) * len(leaf.shape), dtype))
        else:
            read = partial(_assemble, reader, leaf, dtype=dtype)
            value = jax.block_until_ready(jax.make_array_from_callback(leaf.shape, sharding, read))
        put(params, path, value)
    return params


def _assemble(reader: Reader, leaf: Leaf, index: tuple[slice, ...], dtype: Any) -> np.ndarray:
    """`parameter[index]` from the tensors it is made of."""
    wanted = [range(*s.indices(size)) for s, size in zip(index, leaf.shape, strict=True)]
    host = np.empty([len(axis) for axis in wanted], dtype)
    for part in leaf.parts:
        there, source = [], []
        for axis, at in zip(wanted, part.index, strict=True):
            if isinstance(at, int):
                there.append(at - axis.start if at in axis else None)
                continue
            start, stop = max(axis.start, at.start), min(axis.stop, at.stop)
            there.append(slice(start - axis.start, stop - axis.start) if start < stop else None)
            offset = part.rows.start if not source else 0
            source.append(slice(start - at.start + offset, stop - at.start + offset))
        if None not in there:
            host[tuple(there)] = reader.read(part.name, tuple(source))
    return host


def _check(reader: Reader, table: Table, ignored: tuple[str, ...]) -> None:
    wanted = {part.name: part.shape for leaf in table.values() for part in leaf.parts}
    names = reader.names()
    problems = [f"missing {name} {list(shape)}" for name, shape in wanted.items() if name not in names]
    problems += [f"unexpected {name}" for name in sorted(names - set(wanted)) if not name.endswith(ignored or ("\0",))]
    for name in sorted(names & set(wanted)):
        if reader.shape(name) != wanted[name]:
            problems.append(f"{name} must have shape {list(wanted[name])}, got {list(reader.shape(name))}")
        if reader.dtype(name) not in _DTYPES:
            problems.append(f"{name} must be one of {', '.join(_DTYPES)}, got {reader.dtype(name)}")
    if problems:
        raise ValueError(f"{reader.directory} does not match its config.json: " + "; ".join(problems))


def put(tree: dict[str, Any], path: str, value: Any) -> None:
    """Sets the parameter at `path` ("a/b/c") of a nested dict."""
    *parents, name = path.split("/")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[name] = value


def save(directory: str | Path, params: Mapping[str, Any], table: Table, config: Mapping[str, Any]) -> None:
    """Writes `config.json` and `model.safetensors` with the checkpoint's own tensor names and layout."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    flat = {"/".join(k.key for k in path): x for path, x in jax.tree_util.tree_flatten_with_path(dict(params))[0]}
    if set(flat) != set(table):
        raise ValueError(f"parameters and table differ in {sorted(set(flat) ^ set(table))}")
    tensors: dict[str, np.ndarray] = {}
    for path, leaf in table.items():
        host = np.asarray(flat[path])
        for part in leaf.parts:
            tensors.setdefault(part.name, np.empty(part.shape, host.dtype))[part.rows] = host[part.index]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # written for its owner alone otherwise
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
