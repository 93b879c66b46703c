"""Kinds of drafters: one file each, holding only what differs, in a `Kind` that is registered here."""

import re
from pathlib import Path
from typing import Any

from dflash_jax.config import Raw
from dflash_jax.drafters import dflash, dflash2, dspark, eagle3, known, lilicorr, treeflash
from dflash_jax.drafters.base import RULES as BASE_RULES
from dflash_jax.drafters.base import Drafter
from dflash_jax.drafters.config import DrafterConfig, with_mask_token
from dflash_jax.drafters.fields import Lookup, classes_of, unnested
from dflash_jax.drafters.kind import Kind
from dflash_jax.drafters.speculators import flattened
from dflash_jax.sharding import add_rules

AnyKind = Kind[Any, Any]
KINDS: dict[str, AnyKind] = {}  # the first that matches a config is taken


def register(kind: AnyKind) -> None:
    """Makes a kind of drafter known by its name: to loading, training, export and serving.

    A new one is asked before the others whether a `config.json` is one of its own. One that is made anew, as by a cell
    of a notebook that runs again, takes the place of the one before.

    Raises:
        ValueError: there is another one of this name.
    """
    same = lambda one: (type(one).__module__, type(one).__qualname__)
    if same(KINDS.get(kind.name, kind)) != same(kind):
        raise ValueError(f"there is another kind of drafter named {kind.name!r}: {type(KINDS[kind.name]).__name__}")
    before = dict(KINDS)
    KINDS.clear()
    KINDS.update({kind.name: kind} | before if kind.name not in before else before | {kind.name: kind})
    add_rules(kind.rules)


add_rules(BASE_RULES)
for _made in (dflash.DFlash, dspark.DSpark, dflash2.DFlash2, lilicorr.LiLiCorr, treeflash.TreeFlash, eagle3.Eagle3):
    register(_made())


def kind_named(name: str) -> AnyKind:
    """The kind of this name; raises ValueError naming those there are."""
    if name not in KINDS:
        raise ValueError(f"the kind of a drafter must be one of {', '.join(sorted(KINDS))}, got {name!r:.60}")
    return KINDS[name]


def kind_with(drafter: Drafter) -> AnyKind:
    """The kind of a loaded drafter."""
    found = [kind for kind in KINDS.values() if kind.drafter is type(drafter)]
    if not found:
        raise ValueError(f"no kind of drafter is registered for {type(drafter).__name__}")
    return found[0]


def kind_of(raw: Raw) -> str:
    """The name in `KINDS` of a drafter with this `config.json`.

    Raises:
        ValueError: a class that no kind knows, by name.
    """
    raw = laid_out(raw)
    for name in classes_of(raw):
        if not any(re.fullmatch(kind.classes, name) for kind in KINDS.values()):
            raise ValueError(
                f"a drafter of class {name}{known.needs(name)} is not supported; the kinds here are "
                f"{', '.join(sorted(KINDS))}. If it is one of them under another name, correct `architectures` in its "
                "config.json"
            )
    return next(name for name, kind in KINDS.items() if kind.matches(raw))


def laid_out(raw: Raw) -> Raw:
    """A `config.json` as z-lab and others lay it out: fields of the drafter at the top, or in an object of its kind.

    Raises:
        ValueError: it cannot be read as the configuration of one drafter.
    """
    return flattened(unnested(raw), KINDS.values())


def drafter_config(raw: Raw, num_target_layers: int | None = None, target: str | Path | None = None) -> DrafterConfig:
    """Reads a drafter's `config.json`.

    Args:
        num_target_layers: depth of the target, where the config names neither that nor the layers that are tapped, as
            those of official EAGLE-3 drafters.
        target: the target's directory, where the config has its mask token as text: its tokenizer knows the id.

    Raises:
        ValueError: for what is unknown or unsupported.
    """
    raw = with_mask_token(laid_out(raw), target)
    if num_target_layers is not None and Lookup(raw)("num_target_layers") is None:
        raw = {**raw, "num_target_layers": num_target_layers}
    return KINDS[kind_of(raw)].config(raw)
