"""TPU implementation of a block: a key head and the value heads that share it at a time, its state read once.

Shapes: B rows, K key heads, G value heads that share one, T block positions, H key dim, Hv value dim.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from .reference import FORGOTTEN

LANES, SUBLANES = 128, 8


def declines(k: Float[Array, "B T K H"], v: Float[Array, "B T K G Hv"]) -> str | None:
    """Why these shapes are not served, or None."""
    if k.shape[-1] % LANES or v.shape[-1] % LANES:
        return f"head dims {k.shape[-1]} and {v.shape[-1]}; it supports multiples of {LANES}"
    if k.shape[1] > LANES:
        return f"{k.shape[1]} positions; it supports up to {LANES}"
    return None


def read_block(
    q: Float[Array, "B T K H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K G Hv"],
    g: Float[Array, "B T K G"],
    beta: Float[Array, "B T K G"],
    state: Float[Array, "B K G H Hv"],
    seen: Bool[Array, "#B T T"],
) -> tuple[Float[Array, "B T K G Hv"], Float[Array, "B T K G Hv"]]:
    """See `api.read_block`."""
    (B, T, K, H), (G, Hv) = q.shape, v.shape[3:]
    seen = jnp.broadcast_to(seen, (B, T, T))
    short = -T % SUBLANES  # positions that see themselves alone, and correct nothing
    size = T + short
    pad = lambda x, axis: jnp.pad(x, [(0, short if i == axis else 0) for i in range(x.ndim)])
    mask = jnp.pad(seen, ((0, 0), (0, short), (0, short))).astype(jnp.float32)
    operands = (
        pad(q.transpose(0, 2, 1, 3), 2),
        pad(k.transpose(0, 2, 1, 3), 2),
        pad(v.transpose(0, 2, 3, 1, 4), 3),
        pad(jnp.maximum(g, FORGOTTEN).transpose(0, 2, 3, 1), 3)[..., None, :],
        pad(beta.transpose(0, 2, 3, 1), 3)[..., None, :],
        state,
        mask,
    )
    of_key = pl.BlockSpec((None, None, size, H), lambda b, h: (b, h, 0, 0))
    values = pl.BlockSpec((None, None, G, size, Hv), lambda b, h: (b, h, 0, 0, 0))
    scalars = pl.BlockSpec((None, None, G, 1, size), lambda b, h: (b, h, 0, 0, 0))
    states = pl.BlockSpec((None, None, G, H, Hv), lambda b, h: (b, h, 0, 0, 0))
    masks = pl.BlockSpec((None, size, size), lambda b, h: (b, 0, 0))
    like = jax.ShapeDtypeStruct((B, K, G, size, Hv), jnp.float32)
    out, u = pl.pallas_call(
        partial(_kernel, G),
        grid=(B, K),
        in_specs=[of_key, of_key, values, scalars, scalars, states, masks],
        out_specs=[values, values],
        out_shape=[like, like],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="delta_rule",
    )(*operands)
    back = lambda x: x[:, :, :, :T].transpose(0, 3, 1, 2, 4)
    return back(out), back(u)


def _kernel(count: int, *refs: Ref) -> None:
    q_ref, k_ref, v_ref, g_ref, beta_ref, s_ref, seen_ref, out_ref, u_ref = refs
    exact = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    q, k, seen = q_ref[...], k_ref[...], seen_ref[...] > 0
    T = q.shape[0]
    across = lambda x, y: jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())), **exact)
    keys, queries = across(k, k), across(q, k)
    at = jax.lax.broadcasted_iota(jnp.int32, (T, T), 0), jax.lax.broadcasted_iota(jnp.int32, (T, T), 1)
    itself = at[0] == at[1]
    column = lambda row: jnp.sum(jnp.where(itself, row, 0.0), axis=1, keepdims=True)
    mask, after = seen.astype(jnp.float32), seen & ~itself
    for i in range(count):
        g, beta = g_ref[i], column(beta_ref[i])
        # Of each pair, the sum over the positions between them (see `reference.log_decays`).
        between = jnp.dot(mask, jnp.where(after, column(g), 0.0), **exact)
        left = jnp.sum(mask * g, axis=1, keepdims=True)
        decay = jnp.exp(jnp.where(seen, between, -jnp.inf))
        system = jnp.where(itself, 0.0, beta * keys * decay)
        state, left = s_ref[i], jnp.exp(left)
        known = jnp.dot(jnp.concatenate([k, q]), state, **exact)
        right = beta * (v_ref[i] - left * known[:T])

        def solve(t: Array, u: Array, system: Array = system) -> Array:
            # Rows after t do not count: the system is triangular.
            row = jnp.sum(jnp.where(at[0] == t, system, 0.0), axis=0, keepdims=True)
            return jnp.where(at[0][:, :1] == t, u - jnp.dot(row, u, **exact), u)

        u = jax.lax.fori_loop(1, T, solve, right)
        u_ref[i] = u
        out_ref[i] = left * known[T:] + jnp.dot(queries * decay, u, **exact)
