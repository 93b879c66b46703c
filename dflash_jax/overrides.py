"""Fields of a `config.json` that the user replaces, for checkpoints that say something wrong or not enough."""

from collections.abc import Mapping
from typing import Any

from dflash_jax.config import Raw


def overridden(raw: Raw, overrides: Mapping[str, Any] | None) -> Raw:
    """A configuration with some of its fields replaced.

    An object is merged field by field. A field that stands inside an object such as `dflash_config` or `text_config` is
    replaced there, too, so that the file cannot contradict the override; null removes a field.

    Args:
        raw: the object in `config.json`.
        overrides: by name; None or an empty object changes nothing.
    """
    found = dict(raw)
    for name, value in (overrides or {}).items():
        here = found.get(name)
        merged = dict(overridden(here, value)) if isinstance(here, Mapping) and isinstance(value, Mapping) else value
        objects = [place for place, held in found.items() if place.endswith("_config") and isinstance(held, Mapping)]
        inside = [place for place in objects if name in found[place]]
        for place in inside:
            found[place] = {**found[place], name: merged}
        if name in found or not inside:
            found[name] = merged
    return found
