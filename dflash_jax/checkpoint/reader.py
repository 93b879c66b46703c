"""Reads weights along a table, and writes them as safetensors, one tensor at a time."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dflash_jax import files
from dflash_jax.checkpoint import gguf
from dflash_jax.checkpoint.hub import read_json
from dflash_jax.checkpoint.sources import DTYPES
from dflash_jax.checkpoint.table import Leaf, Part, QuantisedLeaf, Table, leaves
from dflash_jax.quantised import Quantised, quantised, quantising

Params = dict[str, Any]  # parameters, nested by the parts of their paths


class Reader:
    """The weight files of one checkpoint directory: names and shapes now, tensors on demand."""

    def __init__(self, directory: Path, rename: Callable[[str], str] = lambda name: name):
        self.directory = directory
        self._headers: dict[Path, tuple[int, dict[str, Any]]] = {}
        self._tensors: dict[str, tuple[Any, str, str]] = {}
        for path, handle in self._handles().items():
            for name in handle.keys():  # noqa: SIM118 (no dict)
                if (known := rename(name)) in self._tensors:
                    raise ValueError(f"{directory} has {name!r:.200} twice, in {self._tensors[known][2]} and {path}")
                self._tensors[known] = handle, name, path

    def _handles(self) -> dict[str, Any]:
        if (self.directory / gguf.INDEX).is_file():
            weights = gguf.Weights(self.directory)
            return {str(weights.path): weights}
        return {path.name: _open(path) for path in weight_files(self.directory)}

    @property
    def mismatch(self) -> str:
        """What is wrong where its tensors are not those of a table."""
        return f"{self.directory} does not match its config.json"

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        handle, stored, _ = self._tensors[name]
        return tuple(handle.get_slice(stored).get_shape())

    def dtype(self, name: str) -> str:
        handle, stored, _ = self._tensors[name]
        return handle.get_slice(stored).get_dtype()

    def read(self, name: str, index: tuple[slice, ...] | None) -> np.ndarray:
        """A slice of a tensor; nothing else of it is read. None is all of it.

        Raises:
            ValueError: numbers in it are infinite or NaN.
        """
        handle, stored, path = self._tensors[name]
        index = (slice(None),) * len(self.shape(name)) if index is None else index
        with files.reading(self.directory / path):
            part = handle.get_slice(stored)
            narrow = part.get_dtype().startswith("F8")  # safetensors asks numpy for these types
            if narrow:
                values = self._mapped(self.directory / path, stored)[index]
            else:
                values = part[index] if index else handle.get_tensor(stored)  # which is a single number
            if not is_finite(values):
                raise ValueError(f"{stored!r} holds infinite numbers or NaN; download it again")
        return values

    def _mapped(self, path: Path, name: str) -> np.ndarray:
        """A tensor of a safetensors file as it lies there."""
        if path not in self._headers:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                self._headers[path] = 8 + size, json.loads(file.read(size))
        begin, header = self._headers[path]
        start, end = header[name]["data_offsets"]
        data = np.memmap(path, np.uint8, mode="r", offset=begin + start, shape=(end - start,))
        return data.view(DTYPES[header[name]["dtype"]]).reshape(header[name]["shape"])


def weight_files(directory: Path) -> list[Path]:
    """The files of a checkpoint that are loaded. Which tensors one holds is read from the file, not from the index.

    Raises:
        ValueError: there are none, or the index is no such index.
    """
    if (directory / gguf.INDEX).is_file():
        return [gguf.Weights(directory).path]
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if not index.is_file():
        if not single.is_file():
            raise ValueError(f"{directory} must hold model.safetensors or its index, found neither")
        return [single]
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{index} must have a weight_map from tensor names to file names")
    if outside := [name for name in names.values() if Path(name).name != name or not name.isprintable()]:
        raise ValueError(f"{index} must name files of its own directory, found {outside[0]!r:.80}")
    paths = [directory / name for name in sorted(set(names.values()))]
    if absent := [path.name for path in paths if not path.is_file()]:
        raise ValueError(f"{index} names files that are missing: {', '.join(absent)}; download them again")
    return paths


# A number that has all of these bits is infinite or NaN: the exponent; all but the sign in float8_e4m3fn.
_NOT_FINITE = {
    "float32": (np.uint32, 0x7F800000),
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
    "float8_e4m3fn": (np.uint8, 0x7F),
    "float8_e8m0fnu": (np.uint8, 0xFF),
}


def is_finite(values: np.ndarray) -> bool:
    """Whether none of these numbers is infinite or NaN."""
    if values.dtype.name not in _NOT_FINITE:
        return True  # integers
    bits, mask = _NOT_FINITE[values.dtype.name]
    return not bool(np.any(np.bitwise_and(values.view(bits), bits(mask)) == mask))


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a complete safetensors file ({error}); download it again") from error


Place = Callable[[str, tuple[int, ...]], jax.sharding.Sharding | None]


def load(
    reader: Reader,
    table: Table,
    dtype: DTypeLike,
    *,
    ignored: Callable[[str], bool] = lambda name: False,
    place: Place = lambda path, shape: None,
    dequantise: bool = False,
    quantise: Callable[[str], str | None] = lambda path: None,
) -> Params:
    """Reads every parameter of `table` as a nested dict of device arrays.

    Args:
        dtype: of every parameter whose leaf names none.
        ignored: whether a tensor of this name may be there without use.
        place: the sharding of a parameter by its path and shape. Each shard goes from the file to its device; only
            one is on the host at a time.
        dequantise: whether weights that are stored quantized become plain ones of `dtype`, one after the other.
        quantise: how the plain weight of a product is quantized, by its path (see `quantised.quantised`); None leaves
            it. That is done where it lies, one weight after the other.

    Raises:
        ValueError: one message listing what is missing, unexpected and misshapen, with counts.
    """
    _check(reader, table, ignored)

    def read(path: str, leaf: Leaf) -> jax.Array:
        sharding, kind = place(path, leaf.shape), _dtype(reader, leaf, dtype)
        if sharding is None:
            return jax.device_put(assemble(reader, leaf, None, kind))
        shard = lambda index: assemble(reader, leaf, index, kind)
        return jax.block_until_ready(jax.make_array_from_callback(leaf.shape, sharding, shard))

    def weight(path: str, leaf: Leaf | QuantisedLeaf) -> jax.Array | Quantised:
        if isinstance(leaf, Leaf):
            found = read(path, leaf)
        else:
            arrays = {name: read(f"{path}/{name}", part) for name, part in leaf.arrays.items()}
            made = leaf.made(arrays, jnp.dtype(dtype))
            if not dequantise:
                return made
            found = jax.block_until_ready(_plain(jnp.dtype(dtype), place(path, made.shape))(made))
        how = quantise(path) if isinstance(leaf, QuantisedLeaf) or leaf.product else None
        return found if how is None else _quantised(path, found, how, place)

    return unflatten_dict({path: weight(path, leaf) for path, leaf in table.items()}, sep="/")


@lru_cache
def _plain(dtype: jnp.dtype, sharding: jax.sharding.Sharding | None) -> Callable[[Quantised], jax.Array]:
    """What makes quantized weights plain; compiled once for all that are alike."""
    return jax.jit(lambda weight: weight.astype(dtype), out_shardings=sharding)


def _dtype(reader: Reader, leaf: Leaf, dtype: DTypeLike) -> DTypeLike:
    """The dtype of a parameter of a model of this one."""
    if leaf.dtype == "stored":
        (name, *_) = leaf.parts[0].source.stored
        return DTYPES[reader.dtype(name)]
    return dtype if leaf.dtype is None else jnp.dtype(leaf.dtype)


def _quantised(path: str, weight: jax.Array, how: str, place: Place) -> Quantised:
    """A weight quantized where it lies, placed as a stored one would be."""
    make = partial(quantised, how=how)
    shapes = jax.eval_shape(make, weight)
    where = jax.tree_util.tree_map_with_path(lambda key, x: place(f"{path}/{key[-1].name}", x.shape), shapes)
    for shape, sharding in zip(jax.tree.leaves(shapes), jax.tree.leaves(where), strict=False):
        try:
            sharding.shard_shape(shape.shape)
        except ValueError as error:
            sizes = list(shape.shape)
            raise ValueError(f"{path} in {how}: an array of {sizes} cannot be split over this mesh") from error
    made = quantising(how, None if place(path, weight.shape) is None else where)
    return jax.block_until_ready(made(weight))


def nested(params: Mapping[str, Any], table: Table, dtype: DTypeLike) -> Params:
    """Parameters by their paths as a nested dict, with `Quantised` where the table has several arrays for a weight.

    Args:
        dtype: of products with quantized weights.
    """

    def stored(path: str, leaf: Leaf | QuantisedLeaf) -> jax.Array | Quantised:
        if isinstance(leaf, Leaf):
            return params[path]
        return leaf.made({name: params[f"{path}/{name}"] for name in leaf.arrays}, jnp.dtype(dtype))

    return unflatten_dict({path: stored(path, leaf) for path, leaf in table.items()}, sep="/")


def flat(params: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a nested dict by their paths; the opposite of `nested`."""
    found = jax.tree.leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in found}


def assemble(reader: Reader, leaf: Leaf, index: tuple[slice, ...] | None, dtype: DTypeLike) -> np.ndarray:
    """`parameter[index]` from the tensors it is made of; nothing else of them is kept. None is all of it.

    Raises:
        ValueError: the index has a step.
    """
    index = (slice(None),) * len(leaf.shape) if index is None else index
    if any(at.step not in (None, 1) for at in index):
        raise ValueError(f"a slice of a parameter must not have a step, got {index}")
    ranges = [range(*s.indices(size)) for s, size in zip(index, leaf.shape, strict=True)]
    host = np.empty([len(axis) for axis in ranges], dtype)
    for part in leaf.parts:
        found = _overlap(part, ranges, leaf.shape)
        if found is not None:
            there, inside = found
            host[there] = _piece(reader, part, inside)
    return host


def _overlap(
    part: Part, ranges: list[range], shape: tuple[int, ...]
) -> tuple[tuple[int | slice, ...], list[slice]] | None:
    """Where a part lies in these ranges, and which stretch of the part that is along each of its axes."""
    there: list[int | slice] = []
    inside: list[slice] = []
    for axis, at, size in zip(ranges, part.index, shape, strict=True):
        if isinstance(at, int):
            if at not in axis:
                return None
            there.append(at - axis.start)
            continue
        begin, end, _ = at.indices(size)
        start, stop = max(axis.start, begin), min(axis.stop, end)
        if start >= stop:
            return None
        there.append(slice(start - axis.start, stop - axis.start))
        inside.append(slice(start - begin, stop - begin))
    return tuple(there), inside


def _piece(reader: Reader, part: Part, inside: list[slice]) -> np.ndarray:
    """A stretch of what a part takes, along each of the parameter's axes that it fills."""
    places = part.places()
    kept = [axis for axis, at in enumerate(places) if not isinstance(at, int)]
    order = part.order or tuple(range(len(kept)))
    chosen = dict(zip((kept[axis] for axis in order), inside, strict=True))
    box: list[slice] = []
    within: list[Any] = []  # of what is read along an axis: places, or None for all, in order
    for axis, at in enumerate(places):
        at = range(at, at + 1) if isinstance(at, int) else at[chosen[axis]]
        ends = (at[0], at[-1]) if isinstance(at, range) else (at.min(), at.max())
        low, high = int(min(ends)), int(max(ends)) + 1  # one stretch of the file
        box.append(slice(low, high))
        within.append(None if isinstance(at, range) and at.step == 1 else np.asarray(at) - low)
    sizes = [len(at) if isinstance(at, np.ndarray) else s.stop - s.start for at, s in zip(within, box, strict=True)]
    tensor = part.source.read(reader.read, tuple(box))
    if any(at is not None for at in within):
        tensor = tensor[np.ix_(*(np.arange(n) if at is None else at for at, n in zip(within, sizes, strict=True)))]
    return tensor.reshape([sizes[axis] for axis in kept]).transpose(order)


def _check(reader: Reader, table: Table, ignored: Callable[[str], bool]) -> None:
    expected = {
        name: how for _, leaf in leaves(table) for part in leaf.parts for name, how in part.source.stored.items()
    }
    names = reader.names()
    problems = [(name, f"missing {name} {list(how.shape)}") for name, how in expected.items() if name not in names]
    for name in sorted(names - set(expected)):
        if not ignored(name):
            problems.append((name, f"unexpected {name if name.isprintable() else repr(name)}"))
    for name in sorted(names & set(expected)):
        how, shape, found = expected[name], reader.shape(name), reader.dtype(name)
        if not how.fits(shape):
            problems.append((name, f"{name} must have shape {list(how.shape)}, got {list(shape)}"))
        if found not in how.dtypes:
            problems.append((name, f"{name} must be one of {', '.join(how.dtypes)}, got {found}"))
    if problems:
        raise ValueError(files.one_line(f"{reader.mismatch}: {_listed(problems)}"))


def _listed(problems: Iterable[tuple[str, str]]) -> str:
    """What is wrong with each tensor; once for those whose names differ in their numbers alone."""
    alike: dict[str, list[str]] = {}
    for name, problem in problems:
        alike.setdefault(problem.replace(name, re.sub(r"\d+", "*", name)), []).append(problem)
    more = lambda count: f" (and {count - 1} more like it)" if count > 1 else ""
    return "; ".join(texts[0] + more(len(texts)) for texts in alike.values())


def save(directory: str | Path, params: Mapping[str, Any], table: Table, config: Mapping[str, Any]) -> None:
    """Writes `config.json` and `model.safetensors` with the checkpoint's own tensor names and layout.

    Raises:
        ValueError: parameters and table differ.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    arrays, expected = flat(params), dict(leaves(table))
    if set(arrays) != set(expected):
        raise ValueError(f"parameters and table differ in {sorted(set(arrays) ^ set(expected))}")
    sources: dict[Any, np.ndarray] = {}
    for path, leaf in expected.items():
        host = np.asarray(arrays[path])
        for part in leaf.parts:
            tensor = sources.setdefault(part.source, np.zeros(part.source.shape, host.dtype))
            piece = host[part.index]
            places = [np.atleast_1d(at) for at in part.places()]
            if part.order is not None:
                piece = piece.transpose(np.argsort(part.order))
            tensor[np.ix_(*places)] = piece.reshape([len(at) for at in places])
    tensors = {name: value for source, whole in sources.items() for name, value in source.write(whole).items()}
    path = directory / "model.safetensors"
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # what the system refuses, as on a full disk
        raise OSError(f"{path} could not be written: {error}") from error
    path.chmod(0o644)  # written for its owner alone otherwise
    files.write_json(directory / "config.json", config)
