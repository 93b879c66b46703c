"""Tensors in memory, read as those of a checkpoint are."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Array

from dflash_jax.checkpoint.reader import Reader, is_finite
from dflash_jax.checkpoint.sources import DTYPES

Named = Mapping[str, Array | np.ndarray]  # tensors by the names of a checkpoint
_NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}


class Tensors(Reader):
    """Arrays of jax or numpy by the names that a checkpoint has for them."""

    def __init__(self, tensors: Named, rename: Callable[[str], str] = lambda name: name):
        self.directory = Path("the given tensors")
        self._arrays = {rename(name): array for name, array in tensors.items()}
        if len(self._arrays) < len(tensors):
            raise ValueError("two of the given tensors are the same one, under names of different variants")

    @property
    def mismatch(self) -> str:
        return "the given tensors do not fit the model"

    def names(self) -> set[str]:
        return set(self._arrays)

    def drop(self, name: str) -> None:
        del self._arrays[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._arrays[name].shape)

    def dtype(self, name: str) -> str:
        dtype = np.dtype(self._arrays[name].dtype)
        return _NAMES.get(dtype, dtype.name)

    def read(self, name: str, index: tuple[slice, ...] | None) -> np.ndarray:
        found = np.asarray(self._arrays[name] if not index else self._arrays[name][index])
        if not is_finite(found):
            raise ValueError(f"{name!r:.200} holds infinite numbers or NaN")
        return found
