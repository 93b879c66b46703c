"""Kinds of drafters: one file each, holding only what differs.

A kind is a module with `config(raw) -> DrafterConfig`; a class `Drafter(params, config, layout=, mesh=)`, a
`base.Drafter`; `tensors(config, layout)`, which says what every parameter is made of; and `canonical_name`, which gives
tensors of published variants the names in that table. For training, `fresh(common, settings)` is the `config.json` of a
new one, and `initial(path, shape)` a new parameter that is not drawn as others are. `RULES` says how parameters of its
own are split, as in `models`.
"""

from types import ModuleType

from dflash_jax.config import Raw
from dflash_jax.drafters import dflash, dflash2, dspark, eagle3, treeflash
from dflash_jax.drafters.config import DrafterConfig, Lookup, classes_of
from dflash_jax.drafters.speculators import flattened
from dflash_jax.sharding import add_rules

KINDS: dict[str, ModuleType] = {
    "dflash": dflash,
    "dflash2": dflash2,
    "dspark": dspark,
    "eagle3": eagle3,
    "treeflash": treeflash,
}
for module in KINDS.values():
    add_rules(getattr(module, "RULES", ()))


def kind_of(raw: Raw) -> str:
    """The name in `KINDS` of a drafter with this `config.json`."""
    get, classes = Lookup(raw := flattened(raw)), classes_of(raw)
    if "eagle3" in classes.lower():
        return "eagle3"
    if "TreeFlash" in classes or any(get(name) for name in treeflash.FIELDS):
        return "treeflash"
    if "DFlash2" in classes or any(get(name) for name in dflash2.FIELDS):
        return "dflash2"
    return "dspark" if "DSpark" in classes or any(get(name) for name in dspark.FIELDS) else "dflash"


def drafter_config(raw: Raw, num_target_layers: int | None = None) -> DrafterConfig:
    """Reads a drafter's `config.json`.

    Args:
        num_target_layers: depth of the target, where the config names neither that nor the layers that are tapped, as
            those of official EAGLE-3 drafters.

    Raises:
        ValueError: for what is unknown or unsupported.
    """
    raw = flattened(raw)
    if num_target_layers is not None and Lookup(raw)("num_target_layers") is None:
        raw = {**raw, "num_target_layers": num_target_layers}
    return KINDS[kind_of(raw)].config(raw)
