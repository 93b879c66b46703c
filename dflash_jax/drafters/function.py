"""Proposers of your own: from a plain function of the tokens, or by the name of a module (`--drafter module:Name`)."""

import importlib
import sys
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int, PyTree

from dflash_jax.decoding.choice import Choice
from dflash_jax.decoding.proposal import Proposal
from dflash_jax.decoding.state import DraftModel, Query, TargetModel
from dflash_jax.drafters.ngram import FromText, NgramConfig
from dflash_jax.files import said

Function = Callable[[Int[Array, " S"], Int[Array, ""]], Int[Array, " P"]]


class FunctionDrafter(FromText):
    """What `stateless` makes."""

    function: Function = struct.field(pytree_node=False, kw_only=True)

    def propose(self, target: TargetModel, state: PyTree, query: Query, choice: Choice) -> Proposal:
        depth, (B,) = self.depth(query.block_size), query.anchor.shape
        history, known = choice.history, choice.known
        pages = history.pages
        size = history.tokens.shape[1] * (1 if pages is None else pages.shape[1])
        tokens = history.at(jnp.broadcast_to(jnp.arange(size)[None], (B, size)))
        proposed = jax.vmap(self.function)(tokens, known)
        if proposed.ndim != 2 or proposed.shape[1] < depth or not jnp.issubdtype(proposed.dtype, jnp.integer):
            raise ValueError(
                f"the function of a proposer must return at least {depth} token ids, got {proposed.dtype} "
                f"{proposed.shape[1:]}"
            )
        chain = jnp.clip(proposed[:, :depth].astype(jnp.int32), 0, target.config.vocab_size - 1)
        if not (nodes := choice.nodes):
            return Proposal(chain)
        # A chain in a tree; nodes beyond its end hang on the anchor.
        reach, index = min(depth, nodes), jnp.arange(nodes)
        parents = jnp.where(index < reach, index, 0).astype(jnp.int32)
        return Proposal(
            chain[:, jnp.where(index < reach, index, 0)], jnp.broadcast_to(parents[None], (B, nodes)), reach
        )


def stateless(function: Function, block_size: int = 16) -> DraftModel:
    """A drafter of any target from a function of the text so far. What it proposes decides the speed, never the answer.

    Args:
        function: of one sequence: its tokens [S], of which only the first `length` count, and that length; returns
            token ids [P] that may follow, P at least `block_size` - 1. It is traced by JAX, and mapped over sequences.
        block_size: proposals of a step, and one.

    Raises:
        ValueError: `block_size` is below 2; or, once it is traced, the function returns too few token ids.
    """
    if block_size < 2:
        raise ValueError(f"block_size must be at least 2, got {block_size}")
    return FunctionDrafter(NgramConfig(block_size), function=function)


def imported(name: str) -> DraftModel:
    """The object `module:Name`, or what it returns without arguments if it is a class or a function. Modules of the
    current folder are found, too.

    Raises:
        ValueError: there is no such module or object, or it is no drafter.
    """
    module, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.append("")
    try:
        value = getattr(importlib.import_module(module), attribute)
        if callable(value) and (isinstance(value, type) or not hasattr(value, "propose")):
            value = value()
    except Exception as error:  # the module may raise anything
        raise ValueError(f"{name} cannot be imported: {said(error)}") from error
    check_protocol(value)
    return cast(DraftModel, value)


def check_protocol(drafter: object) -> None:
    """Raises ValueError for an object without the members of `DraftModel`; names them."""
    needed = "config taps depth init_state propose commit".split()
    missing = [name for name in needed if not hasattr(drafter, name)]
    if (config := getattr(drafter, "config", None)) is not None:
        missing += [f"config.{name}" for name in ("block_size", "check_pair") if not hasattr(config, name)]
    if missing:
        raise ValueError(
            f"a drafter must have {', '.join(needed)}; {type(drafter).__name__} has no {', '.join(missing)}. "
            "dflash_jax.stateless makes one of a function of the tokens"
        )
