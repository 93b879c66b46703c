"""Tools that read the fields of a drafter's `config.json`, wherever they stand in it."""

import json
from typing import Any

from dflash_jax.config import Raw
from dflash_jax.config_json import mapping, require

# Fields of a wrapper around a text model: parts that are no drafter's, and names that differ inside and outside.
_OTHER_PARTS = "vision_config", "audio_config", "vit_config"
_ABOUT = "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "auto_map"


class Lookup:
    """Finds a drafter field in an object like `dflash_config` or at the top level; a conflict between them raises."""

    def __init__(self, raw: Raw, inside: str = "dflash_config"):
        self.nested, self.raw, self.inside = mapping(raw, inside), raw, inside

    @property
    def given(self) -> Raw:
        """All fields that are set, in either place."""
        return {
            name: value for fields in (self.raw, self.nested) for name, value in fields.items() if value is not None
        }

    def __call__(self, *names: str, default: Any = None) -> Any:
        found = {
            f"{place}{name}": source[name]
            for name in names
            for place, source in ((f"{self.inside}.", self.nested), ("", self.raw))
            if source.get(name) is not None
        }
        values = list(found.values())
        if any(value != values[0] for value in values):
            raise ValueError(f"config.json contradicts itself: {found}")
        return values[0] if values else default


def classes_of(raw: Raw) -> list[str]:
    """The names of `architectures`."""
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"config.json: architectures must be a list of class names, got {names!r:.80}")
    return names


def flag(get: Lookup, *names: str) -> bool | None:
    """Whether it is on; None where it is not given."""
    value = get(*names)
    if not isinstance(value, bool | None):
        raise ValueError(f"{names[0]} must be true or false, got {value!r:.80}")
    return value


def size(get: Lookup, name: str, *, default: int | None = None, most: int | None = None) -> int:
    """A positive whole number; see `config_json.require`."""
    return require({name: get(name, default=default)}, name, most=most)


def number(get: Lookup, *names: str, default: float) -> float:
    value = get(*names, default=default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e30:
        raise ValueError(f"{names[0]} must be a number, got {value!r:.80}")
    return float(value)


def unnested(raw: Raw) -> Raw:
    """A config whose text part lies in `text_config`, as one without; as it is if it has none.

    Raises:
        ValueError: it describes other parts as well, or says something twice and differently.
    """
    inside = mapping(raw, "text_config")
    if not inside:
        return raw
    outside = {name: value for name, value in raw.items() if name != "text_config" and value is not None}
    if parts := sorted(name for name in outside if name.endswith("_config") and name in _OTHER_PARTS):
        off = json.dumps(dict.fromkeys(parts))
        raise ValueError(
            f"config.json wraps the drafter in text_config beside {', '.join(parts)}, and a drafter has no such parts; "
            f"if these are its target's, pass --drafter-config '{off}'"
        )
    # The model type inside is that of the layers; outside it is the wrapper's.
    named = {"model_type": inside["model_type"]} if inside.get("model_type") is not None else {}
    merged = {**inside, **outside, **named}
    if twice := sorted(k for k in inside if inside[k] is not None and inside[k] != merged[k] and k not in _ABOUT):
        values = ", ".join(f"{k} = {merged[k]!r:.60} and {inside[k]!r:.60}" for k in twice)
        raise ValueError(f"config.json contradicts itself, outside and inside text_config: {values}")
    return merged


def whole_rotary(raw: Raw) -> Raw:
    """A config whose drafter rotates whole heads, without fields that say so.

    Raises:
        ValueError: it rotates a part of a head for some readers, and all of it for others.
    """
    place = "rope_parameters" if mapping(raw, "rope_parameters") else "rope_scaling"
    inside, size = dict(mapping(raw, place)), raw.get("head_dim")
    width, shares = inside.pop("rope_dim", None), [inside.pop("partial_rotary_factor", None)]
    shares.append(raw.get("partial_rotary_factor"))
    parts = [share for share in shares if share not in (None, 1)]
    if width is None and not parts:
        return raw
    if width == size and width is not None:  # the width that it was trained with; SGLang, too, reads no share then
        return {**raw, place: inside, "partial_rotary_factor": None}
    given = f"rope_dim = {width!r:.40}" if width is not None else f"partial_rotary_factor = {parts[0]!r:.40}"
    off = lambda fields, *names: dict.fromkeys(name for name in names if fields.get(name) is not None)
    whole: dict[str, Any] = off(raw, "partial_rotary_factor")
    if removed := off(mapping(raw, place), "rope_dim", "partial_rotary_factor"):
        whole[place] = inside | removed
    raise ValueError(
        f"config.json: {given} is read in two ways. transformers' Qwen3 and Llama, with which drafters are trained, "
        "ignore it and rotate whole heads (DeepSpec#71, speculators#613); SGLang 0.5.23 and vLLM rotate that part of a "
        f"head. A part is not supported; if whole heads are meant, pass --drafter-config '{json.dumps(whole)}'"
    )
