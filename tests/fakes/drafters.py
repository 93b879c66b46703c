"""Drafters that are none: they test what the algorithm may ask of one."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P

from dflash_jax.decoding.proposal import Proposal
from dflash_jax.mesh import ROWS


class Successors(struct.PyTreeNode):
    """Which token last followed each token of a row [R, V], and the token before the next [R]: no cache at all."""

    table: Any
    last: Any

    def begin(self, row):
        return self.replace(table=self.table.at[row].set(0), last=self.last.at[row].set(-1))

    def snapshot(self, row, start, count):
        return Row(*(jax.lax.dynamic_slice_in_dim(x, row, 1) for x in (self.table, self.last)))

    def restore(self, snapshot, row, end):
        put = lambda all, one: jax.lax.dynamic_update_slice_in_dim(all, one, row, 0)
        return self.replace(table=put(self.table, snapshot.table), last=put(self.last, snapshot.last))

    def partition(self):
        return self.replace(table=P(ROWS), last=P(ROWS))


class Row(struct.PyTreeNode):
    """A snapshot."""

    table: Any
    last: Any

    def partition(self):
        return Row(P(), P())


class Config:
    block_size = 4

    def check_pair(self, target):
        pass


class BigramDrafter(struct.PyTreeNode):
    """Proposes what followed each token the last time, one token after the other."""

    vocab_size: int = struct.field(pytree_node=False)
    forked: bool = struct.field(pytree_node=False, default=False)  # whether it proposes a tree
    config = Config()
    taps = ()

    def depth(self, block_size):
        return block_size - 1

    def init_state(self, rows, slots, widest=1):
        return Successors(jnp.zeros((rows, self.vocab_size), jnp.int32), jnp.full(rows, -1, jnp.int32))

    def propose(self, target, state, query, choice):
        anchor, block_size = query.anchor, query.block_size
        state = state if query.rows is None else jax.tree.map(lambda x: x[query.rows], state)
        table = self._learn(state, anchor[:, None], jnp.ones_like(anchor)).table
        tokens, token = [], anchor
        for depth in range(block_size - 1):
            guess = jnp.take_along_axis(table, token[:, None], axis=1)[:, 0]
            scores = jnp.where(jnp.arange(self.vocab_size)[None] == guess[:, None], 5.0, 0.0)[:, None]
            before = jnp.stack(tokens, axis=1) if tokens else None
            token = choice.tokens(scores, depth=depth, before=before)[:, 0]
            tokens.append(token)
        if not self.forked:
            return Proposal(jnp.stack(tokens, axis=1))
        # Beside every node another one, of the next token.
        pairs = jnp.stack([x for token in tokens for x in (token, (token + 1) % self.vocab_size)], axis=1)
        parents = jnp.asarray([0, 0, *(2 * d - 1 for d in range(1, block_size - 1) for _ in range(2))], jnp.int32)
        return Proposal(pairs, jnp.broadcast_to(parents[None], pairs.shape), block_size - 1)

    def commit(self, target, state, seen):
        rows = jnp.arange(seen.tokens.shape[0]) if seen.rows is None else seen.rows
        part = jax.tree.map(lambda x: x[rows], state)
        return jax.tree.map(lambda all, some: all.at[rows].set(some), state, self._learn(part, seen.tokens, seen.kept))

    def _learn(self, state, tokens, kept):
        def one(i, state):
            token, row = tokens[:, i], jnp.arange(tokens.shape[0])
            known = (i < kept) & (state.last >= 0)
            at = jnp.where(known, state.last, self.vocab_size)
            table = state.table.at[row, at].set(token, mode="drop")
            return state.replace(table=table, last=jnp.where(i < kept, token, state.last))

        return jax.lax.fori_loop(0, tokens.shape[1], one, state)


def random_tree(key, truth, nodes, depth, vocab_size):
    """A tree of random shape for every row, about half of whose nodes are right if their parents are.

    Args:
        truth: what follows each anchor, [B, depth].
    """
    B = truth.shape[0]
    parents = jnp.zeros((B, nodes), jnp.int32)
    depths = jnp.zeros((B, nodes + 1), jnp.int32)
    row = jnp.arange(B)
    for i in range(nodes):
        # A parent anywhere before, as long as the tree stays shallow; one that is too deep gives way to the anchor.
        parent = jax.random.randint(jax.random.fold_in(key, i), (B,), 0, i + 1)
        parent = jnp.where(depths[row, parent] < depth, parent, 0)
        parents = parents.at[:, i].set(parent)
        depths = depths.at[:, i + 1].set(depths[row, parent] + 1)
    right = jnp.take_along_axis(truth, depths[:, 1:] - 1, axis=1)
    wrong = jax.random.randint(jax.random.fold_in(key, nodes), right.shape, 0, vocab_size)
    tokens = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, nodes + 1), 0.6, right.shape), right, wrong)
    return Proposal(tokens.astype(jnp.int32), parents, depth)
