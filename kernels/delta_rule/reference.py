"""XLA implementation: every platform, and the oracle of the other implementations."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..products import product

CHUNK = 64  # positions whose corrections are solved for at once
LEAF = 8  # of a triangular system that is solved row by row
FORGOTTEN = -200.0  # the exponential of this, and of all that is less, is 0 in float32


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


def log_decays(
    g: Float[Array, "*L T K G"], seen: Bool[Array, "*L T T"]
) -> tuple[Float[Array, "*L K G T"], Float[Array, "*L K G T T"]]:
    """Logarithms of what is left at each position of the state before the block, and of what each position that it
    sees added: sums of `g` over the positions between, each on its own. All terms of a sum have one sign, so it is as
    exact as they are; and none is infinite, so a product with a mask of zeros and ones is a sum."""
    g, mask = jnp.maximum(g, FORGOTTEN), seen.astype(jnp.float32)
    after = jnp.where(jnp.eye(seen.shape[-1], dtype=bool), False, seen)  # [m, i]: m stands after i
    terms = jnp.where(after[..., None, None, :, :], jnp.moveaxis(g, -3, -1)[..., None], 0.0)
    return product("...ti,...ikg->...kgt", mask, g), product("...tm,...kgmi->...kgti", mask, terms)


def _within(
    q: Float[Array, "*L T K H"],
    k: Float[Array, "*L T K H"],
    fading: Float[Array, "*L K G T T"],
    beta: Float[Array, "*L K G T"],
    seen: Bool[Array, "*L T T"],
) -> tuple[Float[Array, "*L K G T T"], Float[Array, "*L K G T T"]]:
    """What positions make of each other: the system I + A of their corrections, inverted, and the weights of these in
    the outputs. `fading` is the logarithm of what is left at each position of what another added."""
    T = k.shape[-3]
    decay = jnp.exp(jnp.where(seen[..., None, None, :, :], fading, -jnp.inf))
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
) -> tuple[Float[Array, "B T K G Hv"], Float[Array, "B T K G Hv"]]:
    """See `api.read_block`."""
    seen = jnp.broadcast_to(seen, (q.shape[0], *seen.shape[1:]))
    left, fading = log_decays(g, seen)
    rate = beta.transpose(0, 2, 3, 1)
    solved, weights = _within(q, k, fading, rate, seen)
    left = jnp.exp(left)[..., None]
    read = product("btkh,bkghv->bkgtv", jnp.concatenate([k, q], axis=1), state)  # the state is read once
    known, found = jnp.split(read, 2, axis=3)
    u = product("bkgti,bkgiv->bkgtv", solved, rate[..., None] * (v.transpose(0, 2, 3, 1, 4) - left * known))
    out = left * found + product("bkgti,bkgiv->bkgtv", weights, u)
    return out.transpose(0, 3, 1, 2, 4), u.transpose(0, 3, 1, 2, 4)


def advance(
    state: Float[Array, "B K G H Hv"],
    k: Float[Array, "B J K H"],
    u: Float[Array, "B J K G Hv"],
    g: Float[Array, "B J K G"],
    kept: Int[Array, " B"],
) -> Float[Array, "B K G H Hv"]:
    """See `api.advance`."""
    # What was not accepted may be anything, even NaN.
    taken = (jnp.arange(k.shape[1])[None] < kept[:, None])[:, :, None, None]
    k, u, g = jnp.where(taken, k, 0.0), jnp.where(taken[..., None], u, 0.0), jnp.where(taken, g, 0.0)
    since = jnp.cumsum(g[:, ::-1], axis=1)[:, ::-1]  # from each position to the last one that is kept
    after = jnp.concatenate([since[:, 1:], jnp.zeros_like(since[:, :1])], axis=1)
    added = product("bjkh,bjkgv->bkghv", k, jnp.exp(after)[..., None] * u)
    return jnp.exp(since[:, 0, :, :, None, None]) * state + added


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
    kept, fading = log_decays(g, seen)
    rate = beta.transpose(0, 1, 3, 4, 2)
    solved, weights = _within(q, k, fading, rate, seen)
    # Which positions go on from the state before their chunk.
    first = jnp.concatenate([before[:, None], documents[:, :-1, -1]], axis=1)
    goes_on = (documents == first[..., None])[:, :, None, None]
    left = jnp.where(goes_on, jnp.exp(kept), 0.0)
    wanted = product("bckgti,bckgiv->bckgtv", solved, rate[..., None] * v.transpose(0, 1, 3, 4, 2, 5))
    keys = k.transpose(0, 1, 3, 2, 4)[:, :, :, None]
    reads = product("bckgti,bckgih->bckgth", solved, (rate * left)[..., None] * keys)
    queries = left[..., None] * q.transpose(0, 1, 3, 2, 4)[:, :, :, None]
    ends = (documents == documents[..., -1:])[:, :, None, None]
    lasting = jnp.exp(jnp.where(ends, fading[..., -1, :], -jnp.inf))[..., None] * keys
    keep = left[..., -1]

    def one(state: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        wanted, reads, queries, weights, lasting, keep = xs
        u = wanted - product("bkgth,bkghv->bkgtv", reads, state)
        out = product("bkgth,bkghv->bkgtv", queries, state) + product("bkgti,bkgiv->bkgtv", weights, u)
        return keep[..., None, None] * state + product("bkgth,bkgtv->bkghv", lasting, u), out

    by_chunk = [x.swapaxes(0, 1) for x in (wanted, reads, queries, weights, lasting, keep)]
    state, out = jax.lax.scan(one, state, tuple(by_chunk))
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(B, T + short, *v.shape[3:])[:, :T], state
