"""XLA implementation: every platform, and the oracle of the other implementations."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

CHUNK = 64  # positions whose corrections are solved for at once
LEAF = 8  # of a triangular system that is solved row by row


def declines(k: Float[Array, "B T K H"], v: Float[Array, "B T K G Hv"]) -> str | None:
    """Why these shapes are not served: never."""
    return None


def product(pattern: str, a: Array, b: Array) -> Array:
    """`jnp.einsum` of float32 as float32: errors of a state stay in it."""
    return jnp.einsum(pattern, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def unit_lower_inverse(A: Float[Array, "*L T T"]) -> Float[Array, "*L T T"]:
    """The inverse of I + A for a strictly lower triangular A.

    By substitution, and by blocks above that: sums of powers of A, as of a Neumann series, explode where keys are alike
    (families 3 has a table).
    """
    T = A.shape[-1]
    if T <= LEAF:
        identity = jnp.broadcast_to(jnp.eye(T, dtype=A.dtype), A.shape)
        rows = [identity[..., 0, :]]
        for i in range(1, T):
            known = jnp.stack(rows, axis=-2)
            rows.append(identity[..., i, :] - product("...j,...jk->...k", A[..., i, :i], known))
        return jnp.stack(rows, axis=-2)
    half = -(-T // 2 // LEAF) * LEAF
    upper, lower = unit_lower_inverse(A[..., :half, :half]), unit_lower_inverse(A[..., half:, half:])
    between = -product("...ij,...jk->...ik", lower, product("...ij,...jk->...ik", A[..., half:, :half], upper))
    nothing = jnp.zeros((*A.shape[:-2], half, T - half), A.dtype)
    top, bottom = jnp.concatenate([upper, nothing], axis=-1), jnp.concatenate([between, lower], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2)


def _within(
    q: Float[Array, "*L T K H"],
    k: Float[Array, "*L T K H"],
    gamma: Float[Array, "*L K G T"],
    beta: Float[Array, "*L K G T"],
    seen: Bool[Array, "*L T T"],
) -> tuple[Float[Array, "*L K G T T"], Float[Array, "*L K G T T"]]:
    """What positions make of each other: the system I + A of their corrections, inverted, and the weights of these in
    the outputs. `gamma` is the logarithm of what is left of the state at each position."""
    T = k.shape[-3]
    # The exponent is of a difference: two exponentials would overflow.
    visible = seen[..., None, None, :, :]
    decay = jnp.exp(jnp.where(visible, gamma[..., :, None] - gamma[..., None, :], -jnp.inf))
    keys = product("...tkh,...ikh->...kti", k, k)[..., None, :, :]
    queries = product("...tkh,...ikh->...kti", q, k)[..., None, :, :]
    before = ~jnp.eye(T, dtype=bool)
    system = jnp.where(before, beta[..., None] * keys * decay, 0.0)
    return unit_lower_inverse(system), queries * decay


def read_block(
    q: Float[Array, "B T K H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K G Hv"],
    g: Float[Array, "B T K G"],
    beta: Float[Array, "B T K G"],
    state: Float[Array, "B K G H Hv"],
    seen: Bool[Array, "#B T T"],
) -> tuple[Float[Array, "B T K G Hv"], Float[Array, "B T K G Hv"], Float[Array, "B T K G"]]:
    """See `api.read_block`."""
    seen = jnp.broadcast_to(seen, (q.shape[0], *seen.shape[1:]))
    gamma = product("bti,bikg->bkgt", seen.astype(jnp.float32), g)
    rate = beta.transpose(0, 2, 3, 1)
    solved, weights = _within(q, k, gamma, rate, seen)
    left = jnp.exp(gamma)[..., None]
    read = product("btkh,bkghv->bkgtv", jnp.concatenate([k, q], axis=1), state)  # the state is read once
    known, found = jnp.split(read, 2, axis=3)
    u = product("bkgti,bkgiv->bkgtv", solved, rate[..., None] * (v.transpose(0, 2, 3, 1, 4) - left * known))
    out = left * found + product("bkgti,bkgiv->bkgtv", weights, u)
    return out.transpose(0, 3, 1, 2, 4), u.transpose(0, 3, 1, 2, 4), gamma.transpose(0, 3, 1, 2)


def advance(
    state: Float[Array, "B K G H Hv"],
    k: Float[Array, "B J K H"],
    u: Float[Array, "B J K G Hv"],
    gamma: Float[Array, "B J K G"],
    kept: Int[Array, " B"],
) -> Float[Array, "B K G H Hv"]:
    """See `api.advance`."""
    last = jnp.take_along_axis(gamma, jnp.maximum(kept - 1, 0)[:, None, None, None], axis=1)
    last = jnp.where((kept > 0)[:, None, None, None], last, 0.0)
    taken = (jnp.arange(k.shape[1])[None] < kept[:, None])[:, :, None, None]
    weight = jnp.exp(jnp.where(taken, last - gamma, -jnp.inf))
    # What was not accepted may be anything, even NaN.
    added = product(
        "bjkh,bjkgv->bkghv",
        jnp.where(taken, k, 0.0),
        jnp.where(taken, weight, 0.0)[..., None] * jnp.where(taken[..., None], u, 0.0),
    )
    return jnp.exp(last[:, 0, :, :, None, None]) * state + added


def read_prompt(
    q: Float[Array, "B T K H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K G Hv"],
    g: Float[Array, "B T K G"],
    beta: Float[Array, "B T K G"],
    state: Float[Array, "B K G H Hv"],
    documents: Int[Array, "B T"],
    before: Int[Array, " B"],
) -> tuple[Float[Array, "B T K G Hv"], Float[Array, "B K G H Hv"]]:
    """See `api.read_prompt`: chunk after chunk, all of them solved at once."""
    B, T = q.shape[:2]
    chunk = min(CHUNK, -(-T // LEAF) * LEAF)
    short = -T % chunk
    pad = lambda x, value=0.0: jnp.pad(x, ((0, 0), (0, short)) + ((0, 0),) * (x.ndim - 2), constant_values=value)
    documents = jnp.pad(documents, ((0, 0), (0, short)), mode="edge")
    cut = lambda x: x.reshape(B, -1, chunk, *x.shape[2:])
    q, k, v, g, beta, documents = (cut(x) for x in (pad(q), pad(k), pad(v), pad(g), pad(beta), documents))
    order = jnp.tril(jnp.ones((chunk, chunk), bool))
    seen = order[None, None] & (documents[..., :, None] == documents[..., None, :])
    gamma = product("bcti,bcikg->bckgt", seen.astype(jnp.float32), g)
    rate = beta.transpose(0, 1, 3, 4, 2)
    solved, weights = _within(q, k, gamma, rate, seen)
    # Which positions go on from the state before their chunk.
    first = jnp.concatenate([before[:, None], documents[:, :-1, -1]], axis=1)
    goes_on = (documents == first[..., None])[:, :, None, None]
    left = jnp.where(goes_on, jnp.exp(gamma), 0.0)
    wanted = product("bckgti,bckgiv->bckgtv", solved, rate[..., None] * v.transpose(0, 1, 3, 4, 2, 5))
    keys = k.transpose(0, 1, 3, 2, 4)[:, :, :, None]
    reads = product("bckgti,bckgih->bckgth", solved, (rate * left)[..., None] * keys)
    queries = left[..., None] * q.transpose(0, 1, 3, 2, 4)[:, :, :, None]
    ends = (documents == documents[..., -1:])[:, :, None, None]
    fading = jnp.exp(jnp.where(ends, gamma[..., -1:] - gamma, -jnp.inf))[..., None] * keys
    keep = left[..., -1]

    def one(state: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        wanted, reads, queries, weights, fading, keep = xs
        u = wanted - product("bkgth,bkghv->bkgtv", reads, state)
        out = product("bkgth,bkghv->bkgtv", queries, state) + product("bkgti,bkgiv->bkgtv", weights, u)
        return keep[..., None, None] * state + product("bkgth,bkgtv->bkghv", fading, u), out

    by_chunk = [x.swapaxes(0, 1) for x in (wanted, reads, queries, weights, fading, keep)]
    state, out = jax.lax.scan(one, state, tuple(by_chunk))
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(B, T + short, *v.shape[3:])[:, :T], state
