"""A target language model: parameters and pure functions."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from dflash_jax import cache as caches
from dflash_jax import checkpoint, models, sharding
from dflash_jax.cache import Block, Cache
from dflash_jax.config import TargetConfig, parse_dtype, token_ids
from dflash_jax.kernels.block_attention import Visibility
from dflash_jax.models.layers import Pass, rope_tables


class Target(struct.PyTreeNode):
    """A loaded target. A pytree of its parameters, so it can be passed to jitted functions.

    Attributes:
        params: nested dict of arrays.
        config: static description.
        directory: where it was loaded from (tokenizer files); empty if it was not.
    """

    params: Any
    config: TargetConfig = struct.field(pytree_node=False)
    directory: str = struct.field(pytree_node=False, default="")

    @property
    def dtype(self) -> jnp.dtype:
        return self.params["embed_tokens"].dtype

    def init_cache(self, rows: int, slots: int) -> Cache:
        """An empty cache for `rows` sequences of up to `slots` committed tokens."""
        return caches.init_cache(self.config, rows, slots, self.dtype)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return self._apply("embed", tokens)

    def forward(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        visible: Visibility | None,
        cache: Cache,
        *,
        taps: tuple[int, ...] = (),
        row: Int[Array, ""] | int = 0,
        starts: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T FD"], tuple[Block, ...]]:
        """One pass of a block behind the committed cache, which it only reads.

        Args:
            tokens, positions: the block; positions are absolute.
            visible: which block positions see each other (row i sees column j); None is causal.
            cache: committed cache.
            taps: layers whose outputs to return as features, in this order.
            row: first cache row of the block; its rows are contiguous.
            starts: where the document of each position begins, if a row packs several: nothing before it
                is seen, and rotary positions count from it.

        Returns:
            Final-normed hidden states, the tapped features side by side (FD = taps times width), and the block's
            fresh keys and values for `cache.commit`.
        """
        within = positions if starts is None else positions - starts
        rope = rope_tables(self.config.rope, self.config.head_dim, within, self.dtype)
        row = jnp.asarray(row, jnp.int32)
        at = Pass(positions, rope, visible, caches.row_lengths(cache, row, tokens.shape[0]), row, starts)
        return self._apply("forward", tokens, at, cache, taps)

    def unembed(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Float32 logits of final-normed hidden states (the drafter's, too)."""
        return self._apply("unembed", hidden)

    def _apply(self, method: str, *args: Any) -> Any:
        model = models.family(self.config.model_type).Model(self.config)
        return model.apply({"params": self.params}, *args, method=method)


def load_target(source: str | Path, *, dtype: str | None = None, mesh: Mesh | None = None) -> Target:
    """Loads a target from a local directory or a hub id.

    Args:
        source: directory with `config.json` and safetensors (single file or sharded), or `owner/name`.
        dtype: "float32", "bfloat16", "float16"; None takes float32 on CPU, bfloat16 elsewhere.
        mesh: devices to spread the weights over (see `sharding`); each shard is read straight to its device.

    Raises:
        ValueError: unsupported configuration, a mesh that its heads cannot be split over, or files that are missing,
            corrupt or do not match it.
    """
    array_type = parse_dtype(dtype)
    directory = checkpoint.resolve(source, "target")
    config = models.target_config(checkpoint.read_json(directory / "config.json"))
    generation = directory / "generation_config.json"
    if generation.is_file() and (ends := token_ids(checkpoint.read_json(generation).get("eos_token_id"))):
        config = dataclasses.replace(config, eos_token_ids=ends)
    config = sharding.shard_config(config, mesh)
    family = models.family(config.model_type)
    reader, place = checkpoint.Reader(directory), sharding.placement(mesh)
    params = checkpoint.load(reader, family.tensors(config), array_type, ignored=family.ignored(config), place=place)
    return Target(params, config, str(directory))
