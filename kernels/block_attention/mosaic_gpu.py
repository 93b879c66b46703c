"""Hopper implementation (Mosaic GPU): to come; until then it declines."""

from jaxtyping import Array, Float


def declines(q: Float[Array, "B T N H"], v: Float[Array, "B K T Hv"], cache_k: Float[Array, "R K S H"]) -> str | None:
    return "not built"


attend = None
