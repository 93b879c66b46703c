"""New weights for an engine that has compiled its programs: checked against those in use, and put where these lie."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import TypedDict, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, PyTree

from dflash_jax import checkpoint, drafters, models
from dflash_jax.checkpoint.memory import Named, Tensors
from dflash_jax.decoding.state import DraftModel
from dflash_jax.drafters.around import inmost, with_inmost
from dflash_jax.drafters.base import Drafter
from dflash_jax.drafters.loading import read_params as read_drafter
from dflash_jax.infer.engine.slots import Slots
from dflash_jax.quantised import INT4_GROUPS, EightBit, FourBit, Quantised, quantising
from dflash_jax.target import Target
from dflash_jax.target import read_params as read_target

Model = TypeVar("Model", Target, Drafter)
Weight = Array | np.ndarray | Quantised
LISTED = 10  # differences that an error names


class Weights:
    """The models of an engine, and those that are to take their place.

    Attributes:
        version: how often new ones were given that are in use now.
        waiting: new ones that are not in use yet; None if there are none.
        now: whether these do not wait for requests in progress.
    """

    def __init__(self, batch: Slots):
        self._batch = batch
        self.version, self._given = 0, 0
        self.waiting: tuple[Target, DraftModel | None] | None = None
        self.now = False

    @property
    def _newest(self) -> tuple[Target, DraftModel | None]:
        calls = self._batch.calls
        return self.waiting or (calls.target, calls.drafter)

    def offer(
        self,
        target: Target | PyTree | None,
        drafter: Drafter | PyTree | None,
        *,
        now: bool,
        check: bool,
        donate: bool,
    ) -> int:
        """Takes new models or their parameters; returns the number of their version. Arguments and errors are those of
        `Engine.update`."""
        if target is None and drafter is None:
            raise ValueError("give a target, a drafter or both")
        new_target, new_drafter = self._newest
        how = {"check": check, "donate": donate}
        if target is not None:
            new_target = fitted("target", new_target, target, **how)
        if drafter is not None:
            old, new = self._drafter(), inmost(drafter)
            if hasattr(new, "propose") and not isinstance(new, Drafter):
                raise ValueError(f"the new drafter has no weights: {type(new).__name__}; give one like that in use")
            new_drafter = with_inmost(new_drafter, fitted("drafter", old, new, **how))
        self._given += 1
        self.waiting, self.now = (new_target, new_drafter), now or (self.now and self.waiting is not None)
        return self._given

    def read(self, target: Named | None, drafter: Named | None) -> tuple[Target | None, Drafter | None]:
        """Models from tensors with the names of a checkpoint, placed and quantized like those in use."""
        target_of: Target | None = None
        drafter_of: Drafter | None = None
        if target is not None:
            old, reader = self._newest[0], Tensors(target)
            config = old.config.with_tensors(reader.names())
            table = models.family(config.model_type).tensors(config, old.layout)
            params = read_target(reader, config, old.layout, old.mesh, old.dtype, **_alike(old.params, table))
            target_of = old.replace(params=params)
        if drafter is not None:
            old = self._drafter()
            kind = drafters.kind_with(old)
            reader = Tensors(drafter, kind.canonical_name)
            if not old.config.own_vocabulary and "d2t" in reader.names() and not reader.read("d2t", None).any():
                reader.drop("d2t")  # all tokens, in the target's order
            how = _alike(old.params, kind.tensors(old.config, old.layout))
            params = read_drafter(reader, kind, old.config, old.layout, old.mesh, old.dtype, **how)
            drafter_of = old.replace(params=params)
        return target_of, drafter_of

    def _drafter(self) -> Drafter:
        drafter = inmost(self._newest[1])
        if not isinstance(drafter, Drafter):
            raise ValueError("the engine has no drafter with weights to take the place of")
        return drafter

    def take(self) -> None:
        """What was waiting is in use from now on. All rows must be idle."""
        assert self.waiting is not None
        self._batch.renew(*self.waiting)
        self.waiting, self.now, self.version = None, False, self._given


def fitted(name: str, old: Model, new: Model | PyTree, *, check: bool, donate: bool) -> Model:
    """`old` with new parameters, where the old ones lie; see `Engine.update`.

    Raises:
        ValueError: they do not fit, or are not finite.
    """
    if isinstance(new, type(old)):
        changed = [one.name for one in fields(old.config) if _differs(old.config, new.config, one.name)]
        if changed or type(new.config) is not type(old.config):
            raise ValueError(f"the new {name} has another configuration: {', '.join(changed) or type(new.config)}")
        if new.layout != old.layout:
            raise ValueError(
                f"the new {name} was loaded for {new.layout.shards} parts of its heads and {new.layout.experts} of "
                f"its experts, and that in use for {old.layout.shards} and {old.layout.experts}: load it with the same "
                "mesh, or use update_from_tensors"
            )
        new = new.params
    elif (old.layout.shards, old.layout.experts) != (1, 1):
        raise ValueError(
            f"the mesh splits heads or experts, and parameters alone do not say for which: give a loaded {name} (with "
            "`replace(params=...)`), or use update_from_tensors"
        )
    expected, got = _by_path(old.params), _by_path(new)
    _raise(name, "do not fit those in use", _differences(expected, got))
    if check:
        finite = {path: all(bool(_finite(x)) for x in jax.tree.leaves(leaf)) for path, leaf in got.items()}
        _raise(name, "are not finite", (path for path, whole in finite.items() if not whole))
    placed = {path: _placed(path, expected[path], got[path], donate) for path in expected}
    leaves, structure = jax.tree.flatten(old.params, is_leaf=_is_weight)
    assert len(leaves) == len(placed)
    made: Model = old.replace(params=jax.tree.unflatten(structure, [placed[path] for path in expected]))
    return made


class Alike(TypedDict):
    """How tensors become parameters like others (see `checkpoint.load`)."""

    dequantise: bool
    quantise: Callable[[str], str | None]


def _alike(params: PyTree, table: checkpoint.Table) -> Alike:
    of = _by_path(params)
    made = {path: _how(leaf) for path, leaf in of.items() if isinstance(leaf, Quantised)}
    stored = [path for path, leaf in table.items() if isinstance(leaf, checkpoint.QuantisedLeaf)]
    plain = any(not isinstance(of.get(path), Quantised) or made[path] is not None for path in stored)
    return {"dequantise": plain, "quantise": made.get}


def _is_weight(x: object) -> bool:
    return isinstance(x, Quantised)


def _by_path(params: PyTree) -> dict[str, Weight]:
    found = jax.tree.leaves_with_path(params, is_leaf=_is_weight)
    array = lambda x: x if isinstance(x, Quantised | jax.Array) else np.asarray(x)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): array(leaf) for path, leaf in found}


def _differs(old: object, new: object, name: str) -> bool:
    return getattr(old, name) != getattr(new, name, None)


def _differences(expected: Mapping[str, Weight], got: Mapping[str, Weight]) -> Iterable[str]:
    yield from (f"missing {path}, {_described(leaf)}" for path, leaf in expected.items() if path not in got)
    yield from (f"unexpected {path}, {_described(leaf)}" for path, leaf in got.items() if path not in expected)
    for path, old in expected.items():
        if path in got and not _fits(old, new := got[path]):
            yield f"{path}: expected {_described(old)}, got {_described(new)}"


def _described(leaf: Weight) -> str:
    kind = leaf.form if isinstance(leaf, Quantised) else leaf.dtype
    return f"{list(leaf.shape)} {kind}"


def _fits(old: Weight, new: Weight) -> bool:
    alike = lambda x: [(jnp.shape(leaf), leaf.dtype) for leaf in jax.tree.leaves(x)]
    if isinstance(old, Quantised) and not isinstance(new, Quantised):  # to be quantized
        return _how(old) is not None and old.shape == new.shape and new.dtype == old.dtype
    return jax.tree.structure(old) == jax.tree.structure(new) and alike(old) == alike(new)


def _how(weight: Quantised) -> str | None:
    """How such a weight is made of a plain one (see `quantised.quantised`); None if it was stored so."""
    if isinstance(weight, EightBit) and weight.block is None:
        return "int8" if weight.values.dtype == jnp.int8 else "fp8"
    if isinstance(weight, FourBit) and weight.code == "int4":
        plain = all(x is None for x in (weight.zero, weight.offset, weight.gain, weight.order))
        group = weight.shape[-1] // weight.scale.shape[-1]
        first = next((size for size in INT4_GROUPS if weight.shape[-1] % size == 0), None)
        return "int4" if plain and group == first else None
    return None


def _placed(path: str, old: Weight, new: Weight, donate: bool) -> Weight:
    """The new weight where the old one lies, quantized as it is."""
    where = jax.tree.map(lambda x: x.sharding, old)
    if isinstance(old, Quantised) and not isinstance(new, Quantised):
        how = _how(old)
        assert how is not None
        made = quantising(how, where)(_moved(new, where.values, donate=True))
        if not _fits(old, made):
            raise ValueError(f"{path} in {how} would be {_described(made)}, not {_described(old)}")
        return made
    return jax.tree.map(lambda x, at: _moved(x, at, donate=donate), new, where)


def _moved(x: Array | np.ndarray, at: Sharding, *, donate: bool) -> Array:
    """An array at these devices; one of its own, if it is not given away."""
    if not isinstance(x, jax.Array):
        return jax.device_put(x, at, may_alias=donate)
    if x.weak_type:  # or programs would be compiled for it
        x = jax.lax.convert_element_type(x, x.dtype)
    # Where only the sharding changes, it may share memory in spite of `may_alias`.
    return jax.device_put(x if donate else jax.device_put(x, x.sharding, may_alias=False), at)


@jax.jit
def _finite(x: Array) -> Array:
    return jnp.all(jnp.isfinite(x.astype(jnp.float32)))


def _raise(name: str, what: str, problems: Iterable[str]) -> None:
    listed = list(problems)
    if listed:
        more = f"; and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
        raise ValueError(f"the new weights of the {name} {what}: {'; '.join(listed[:LISTED])}{more}")
