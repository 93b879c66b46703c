"""What is quantized as it is loaded: `--quantize target=int8,drafter=int8,head=int8`. Imports no jax."""

from collections.abc import Callable, Mapping

KEYS = "target", "drafter", "head"
FORMATS = "int8", "int4", "fp8", "none"
_HEADS = "lm_head", "embed_tokens"  # the latter where it is the head, too

Quantize = str | Mapping[str, str] | None


def parse_quantize(given: Quantize) -> dict[str, str]:
    """What is quantized, and how: formats by their keys, without "none".

    Args:
        given: like "target=int8,head=int8", or the same as a mapping. The target's layers, the drafter's, and the head
            of either are named apart; none follows from another.

    Raises:
        ValueError: an unknown key or format, or a key twice.
    """
    if given is None:
        return {}
    pairs = list(given.items()) if isinstance(given, Mapping) else [_pair(part) for part in given.split(",")]
    expected = f"like target=int8,drafter=int8,head=int8, of {', '.join(KEYS)} and {', '.join(FORMATS)}"
    for key, how in pairs:
        if key not in KEYS or how not in FORMATS:
            raise ValueError(f"quantize must be {expected}; got {key!r:.40}={how!r:.40}")
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"quantize names a key twice: {given!r:.80}")
    return {key: how for key, how in pairs if how != "none"}


def _pair(text: str) -> tuple[str, str]:
    key, _, how = text.strip().partition("=")
    return key, how


def rule(quantize: Mapping[str, str], key: str) -> Callable[[str], str | None]:
    """How a weight is quantized by its path, of the model that this key names; None leaves it.

    Args:
        quantize: from `parse_quantize`.
    """
    return lambda path: quantize.get("head" if path in _HEADS else key)
