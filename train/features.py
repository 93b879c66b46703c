"""Target features written once and read back at every epoch: `cache-features`.

A directory with `features.json`, `features.bin` [tokens, FD] and, for losses against the target's distribution,
`hidden.bin` [tokens, D];
example by example in the order of the data file. Full recipes fill terabytes: compute features online there.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflash_jax.drafters.base import Drafter
from dflash_jax.files import read_json, reading, said, write_json
from dflash_jax.infer.progress import progress_bar
from dflash_jax.mesh import entered, gather, rows_of
from dflash_jax.target import Target
from dflash_jax.train.arguments import CacheFeaturesOptions, settings_given
from dflash_jax.train.blocks import target_features
from dflash_jax.train.data import Example, Packing
from dflash_jax.train.prepare import prepare

BATCH = 4  # rows of a target pass


def model_fingerprint(model: Target | Drafter) -> str:
    """Tells one model from another: its configuration and a sample of every parameter; the same on every mesh."""
    digest = hashlib.sha256(repr(model.config).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(gather(leaf[(0,) * (leaf.ndim - 1)][:256]).tobytes())  # the first row is first on every mesh
    return digest.hexdigest()[:16]


def data_fingerprint(examples: Sequence[Example]) -> str:
    """Tells one list of examples from another."""
    digest = hashlib.sha256()
    for example in examples:
        begins = b"" if example.begins is None else example.begins.tobytes()
        digest.update(example.tokens.tobytes() + example.supervised.tobytes() + begins + b";")
    return digest.hexdigest()[:16]


class FeatureCache:
    """Features of a list of examples on disk.

    Args:
        directory: made by `write_features`.
        target, taps, examples: what is about to be trained.
        hidden: whether final hidden states are needed, too.

    Raises:
        ValueError: no finished cache, or one of another target, other taps or other data.
    """

    def __init__(
        self, directory: str | Path, target: Target, taps: tuple[int, ...], examples: Sequence[Example], hidden: bool
    ):
        directory = Path(directory)
        expected = _description(target, taps, examples, hidden)
        found = _read_description(directory)
        differ = [name for name, value in expected.items() if name != "hidden" and found.get(name) != value]
        if differ:
            raise ValueError(
                f"the feature cache {directory} was made for another run: "
                + "; ".join(f"{name} {found.get(name)!r:.200}, expected {expected[name]!r:.200}" for name in differ)
                + ". Write it again with cache-features"
            )
        if hidden and not found["hidden"]:
            raise ValueError(
                f"{directory} has no final hidden states of the target, which losses against its distribution need "
                "(kl, total_variation, negative_log_acceptance, lk_hybrid, and that of a LiLiCorr drafter); write it "
                "again with cache-features --hidden"
            )
        if found["done"] != len(examples):
            raise ValueError(
                f"{directory} is not finished ({found['done']} of {len(examples)}); run cache-features again"
            )
        self._offsets = _offsets(examples)
        self._features, self._hidden = _open(directory, "r", expected | {"hidden": hidden}, self._offsets[-1])

    def rows(self, contents: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Features [B, S, FD] and hidden states [B, S, D] of packed rows, 0 where a row is not full."""
        hidden = None if self._hidden is None else self._gather(self._hidden, contents, length)
        return self._gather(self._features, contents, length), hidden

    def _gather(self, store: np.ndarray, contents: Sequence[Sequence[int]], length: int) -> np.ndarray:
        out = np.zeros((len(contents), length, store.shape[1]), store.dtype)
        for row, indices in enumerate(contents):
            at = 0
            for index in indices:
                part = store[self._offsets[index] : self._offsets[index + 1]]
                out[row, at : at + len(part)] = part
                at += len(part)
        return out


def write_features(
    directory: str | Path,
    target: Target,
    taps: tuple[int, ...],
    examples: Sequence[Example],
    length: int,
    *,
    hidden: bool = False,
) -> Iterator[int]:
    """Computes and writes the features of all examples; yields how many are done. Continues where it stopped.

    Raises:
        ValueError: the directory holds the cache of something else.
    """
    directory = Path(directory)
    description = _description(target, taps, examples, hidden)
    done = 0
    if (directory / "features.json").exists():
        found = _read_description(directory)
        done = found.pop("done")
        if found != description:
            raise ValueError(f"{directory} holds another feature cache; choose another directory or remove it")
    directory.mkdir(parents=True, exist_ok=True)
    offsets = _offsets(examples)
    stores = _open(directory, "r+" if done else "w+", description, offsets[-1])
    compute = jax.jit(partial(target_features, taps=taps))
    parts = rows_of(target.mesh)
    batch = -(-BATCH // parts) * parts
    packing = Packing(examples, length, batch, 0)
    while done < len(examples):
        contents: list[list[int]] = []
        index = done
        for _ in range(batch):
            row, room = [], length
            while index < len(examples) and len(examples[index].tokens) <= room:
                row.append(index)
                room -= len(examples[index].tokens)
                index += 1
            contents.append(row)
        rows = packing.rows(contents)
        with entered(target.mesh):
            outputs = compute(target, tokens=rows.tokens, starts=rows.starts)
        for store, values in zip(stores, outputs, strict=True):
            if store is None:
                continue
            values = np.asarray(values)
            for row, indices in enumerate(contents):
                at = 0
                for i in indices:
                    size = offsets[i + 1] - offsets[i]
                    store[offsets[i] : offsets[i + 1]] = values[row, at : at + size]
                    at += size
            store.flush()
        done = index
        write_json(directory / "features.json", description | {"done": done})
        yield done


def _description(target: Target, taps: tuple[int, ...], examples: Sequence[Example], hidden: bool) -> dict[str, Any]:
    return {
        "target": model_fingerprint(target),
        "data": data_fingerprint(examples),
        "target_layer_ids": list(taps),
        "hidden_size": target.config.hidden_size,
        "dtype": np.dtype(target.dtype).name,
        "hidden": hidden,
    }


def _read_description(directory: Path) -> dict[str, Any]:
    path = directory / "features.json"
    try:
        found = read_json(path)
        if type(found["done"]) is not int or found["done"] < 0:
            raise ValueError(f"{path}: done must be a whole number, got {found['done']!r:.60}")
        found["hidden"] = bool(found["hidden"])
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{directory} holds no feature cache ({said(error)}); write one with cache-features"
        ) from error
    return found


def _open(directory: Path, mode: Any, description: dict[str, Any], tokens: int) -> tuple[Any, Any]:
    width, dtype = description["hidden_size"], jax.numpy.dtype(description["dtype"])

    def store(name: str, columns: int) -> np.memmap:
        size = tokens * columns * dtype.itemsize
        with reading(directory / name) as path:
            if mode == "w+":  # claim the space now: a full disk met through a memory map is a crash, not an error
                with path.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, size)
            elif (found := path.stat().st_size) != size:
                raise ValueError(f"{path} must have {size} bytes, found {found}; remove {directory} and write it again")
            return np.memmap(path, dtype, "r" if mode == "r" else "r+", shape=(tokens, columns))

    features = store("features.bin", width * len(description["target_layer_ids"]))
    return features, store("hidden.bin", width) if description["hidden"] else None


def _offsets(examples: Sequence[Example]) -> list[int]:
    return [0, *np.cumsum([len(example.tokens) for example in examples]).tolist()]


def main(options: CacheFeaturesOptions) -> int:
    """The stage `cache-features`; returns its exit status."""
    config, target, data, drafter, _ = prepare(options.source, settings_given(options.settings))
    with progress_bar(len(data.examples), "conversation") as bar:
        written = write_features(
            options.output, target, drafter.taps, data.examples, config.length, hidden=options.hidden
        )
        for done in written:
            bar.update(done - bar.n)
    return 0
