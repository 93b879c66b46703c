"""Kinds of drafters: one file each, holding only what differs.

A kind is a module with

- `CLASSES`, a pattern of the names that published configs have in `architectures`, and `matches(raw)`, whether a config
  is of this kind; the first that says so in `KINDS` is taken;
- `config(raw) -> DrafterConfig`;
- a class `Drafter(params, config, layout=, mesh=)`, a `base.Drafter`;
- `tensors(config, layout)`, which says what every parameter is made of, and `canonical_name`, which gives tensors of
  published variants the names in that table;
- for training, `fresh(common, settings)`, the `config.json` of a new one; `becomes(config, raw, settings)`, that of one
  that begins as a drafter of another kind, or None; and `initial(path, shape)`, a new parameter that is not drawn as
  others are.

`RULES` says how parameters of its own are split, as in `models`.
"""

import re
from pathlib import Path
from types import ModuleType

from dflash_jax.config import Raw
from dflash_jax.drafters import dflash, dflash2, dspark, eagle3, known, treeflash
from dflash_jax.drafters.config import DrafterConfig, with_mask_token
from dflash_jax.drafters.fields import Lookup, classes_of, unnested
from dflash_jax.drafters.speculators import flattened
from dflash_jax.sharding import add_rules

KINDS: dict[str, ModuleType] = {
    "eagle3": eagle3,
    "treeflash": treeflash,
    "dflash2": dflash2,
    "dspark": dspark,
    "dflash": dflash,  # last: it takes configs that name no class
}
for module in KINDS.values():
    add_rules(getattr(module, "RULES", ()))


def kind_named(name: str) -> ModuleType:
    """The kind of this name; raises ValueError naming those there are."""
    if name not in KINDS:
        raise ValueError(f"the kind of a drafter must be one of {', '.join(sorted(KINDS))}, got {name!r:.60}")
    return KINDS[name]


def kind_of(raw: Raw) -> str:
    """The name in `KINDS` of a drafter with this `config.json`.

    Raises:
        ValueError: a class that no kind knows, by name.
    """
    raw = laid_out(raw)
    for name in classes_of(raw):
        if not any(re.fullmatch(kind.CLASSES, name) for kind in KINDS.values()):
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
    return flattened(unnested(raw))


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
