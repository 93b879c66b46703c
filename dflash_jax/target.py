"""A target language model: parameters and pure functions."""

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dflash_jax import checkpoint, files, models, sharding
from dflash_jax.cache import Cache, Capacity, init_cache
from dflash_jax.config import TargetConfig, parse_dtype
from dflash_jax.config_json import token_ids
from dflash_jax.kernels.block_attention import Visibility
from dflash_jax.mesh import WHOLE, AnyMesh, Layout, entered
from dflash_jax.models.attention import Inputs, Pass
from dflash_jax.overrides import overridden
from dflash_jax.packing import Packing
from dflash_jax.quantize import Quantize, parse_quantize, rule
from dflash_jax.vocabulary import decodable_tokens


class Target(struct.PyTreeNode):
    """A loaded target. A pytree of its parameters, so it can be passed to jitted functions.

    Attributes:
        params: nested dict of arrays.
        decodable: token ids that may be chosen; None is all. The others are rows of a padded vocabulary that the
            tokenizer cannot turn into text.
        config: static description.
        layout, mesh: how the parameters lie on which devices; every method enters the mesh.
        directory: where it was loaded from (tokenizer files); empty if it was not.
        cache_dtype: "int8" keeps keys and values as codes of 8 bits; None in the dtype of the parameters.
    """

    params: Any
    decodable: Bool[Array, " V"] | None = None
    config: TargetConfig = struct.field(pytree_node=False, kw_only=True)
    layout: Layout = struct.field(pytree_node=False, default=WHOLE, kw_only=True)
    mesh: AnyMesh | None = struct.field(pytree_node=False, default=None, kw_only=True)
    directory: str = struct.field(pytree_node=False, default="", kw_only=True)
    cache_dtype: Literal["int8"] | None = struct.field(pytree_node=False, default=None, kw_only=True)

    @property
    def dtype(self) -> jnp.dtype:
        return self.params["embed_tokens"].dtype

    def init_cache(self, rows: int, slots: Capacity, widest: int = 1) -> Cache:
        """An empty cache for `rows` sequences of up to `slots` committed tokens; see `cache.init_cache`."""
        given = self.config.mixers, rows, slots, self.dtype, self.layout, widest
        return init_cache(*given, int8=self.cache_dtype == "int8")

    def table(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Rows of the embedding table itself, which drafters read with a scale of their own."""
        return self._apply("table", tokens)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Embeddings as the target's first layer reads them."""
        return self._apply("embed", tokens)

    def forward(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        visible: Visibility | None,
        cache: Cache,
        lengths: Int[Array, " B"] | None = None,
        *,
        taps: tuple[int, ...] = (),
        rows: Int[Array, " B"] | None = None,
        starts: Int[Array, "B T"] | None = None,
        counts: Int[Array, " B"] | None = None,
        packing: Packing | None = None,
    ) -> tuple[Float[Array, "b t D"], Float[Array, "b t FD"], tuple[Any, ...]]:
        """One pass of a block after the committed cache, which it only reads.

        Args:
            tokens, positions: the block; positions are absolute.
            visible: which block positions see each other (row i sees column j); None is causal.
            cache: committed cache.
            lengths: committed length of each of the block's rows; None is 0.
            taps: layers whose outputs to return as features, in this order.
            rows: cache row of each of the block's rows, all different; None if the block has every row, in order. See
                `kernels.block_attention.attend` for meshes.
            starts: where the document of each position begins, if a row packs several: nothing before it
                is seen, and rotary positions count from it.
            counts: how many positions of each row are valid, the first ones. The others are padding or belong to an
                idle row: their results are undefined, and they go through no experts. None is all.
            packing: the positions that are computed, if they are not all; those of `counts` among them.

        Returns:
            Final-normed hidden states, the tapped features side by side (FD = taps times width), both of the packed
            positions if there is a packing, and what `cache.commit` wants of the block, for each cache entry.
        """
        lengths = jnp.zeros(tokens.shape[0], jnp.int32) if lengths is None else lengths
        block = Inputs(tokens, positions, visible, lengths, rows, starts, counts, packing)
        return self.forward_all([block], cache, taps=taps)[0]

    def forward_all(
        self, blocks: Sequence[Inputs], cache: Cache, *, taps: tuple[int, ...] = ()
    ) -> list[tuple[Float[Array, "b t D"], Float[Array, "b t FD"], tuple[Any, ...]]]:
        """One pass of several blocks, of different rows, whose positions all go through the same products; returns what
        `forward` does of each."""
        at = None
        for _, positions, visible, lengths, rows, starts, counts, packing in reversed(blocks):
            at = Pass(positions, visible, lengths, rows, None, starts, counts, packing=packing, beside=at)
        assert at is not None
        with entered(self.mesh):
            tokens = at.pack(*(block.tokens for block in blocks))
            hidden, features, fresh = self._apply("forward", tokens, at, cache, taps)
            of_each = [fresh] if at.beside is None else [*zip(*fresh, strict=True)]
            return [*zip(at.apart(hidden), at.apart(features), of_each, strict=True)]

    def head(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Float32 products with the head itself, which drafters read with a scale and softcap of their own."""
        return self._apply("head", hidden)

    def unembed(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Float32 logits of the target's own final-normed hidden states."""
        return self._apply("unembed", hidden)

    def _apply(self, method: str, *args: Any) -> Any:
        model = models.family(self.config.model_type).Model(self.config, self.layout)
        with entered(self.mesh):
            return model.apply({"params": self.params}, *args, method=method)


def read_target_config(directory: Path, overrides: Mapping[str, Any] | None = None) -> TargetConfig:
    """What a checkpoint directory says of its target, without its weights.

    End tokens are those of `generation_config.json`, where that names some: published ones name more there.

    Args:
        overrides: fields of `config.json` to replace (see `overrides.overridden`); end tokens among them win.

    Raises:
        ValueError: unknown or unsupported fields, or files that cannot be read.
    """
    with files.reading(directory / "config.json"):
        config = models.target_config(overridden(checkpoint.read_config(directory), overrides))
    with files.reading(directory / "generation_config.json") as path:
        if "eos_token_id" in (overrides or {}) or not path.exists():
            return config
        ends = token_ids(checkpoint.read_json(path).get("eos_token_id"), path.name)
        return dataclasses.replace(config, eos_token_ids=ends) if ends else config


def load_target(
    source: str | Path,
    *,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    overrides: Mapping[str, Any] | None = None,
    quantize: Quantize = None,
) -> Target:
    """Loads a target from a local directory, a GGUF file or a hub id.

    Args:
        source: directory with `config.json` and safetensors (single file or sharded), a `.gguf` file of the Llama
            family, or a hub id, `owner/name`.
        dtype: "float32", "bfloat16" or "float16", of all weights. None or "auto" is float32 on CPU and bfloat16
            elsewhere, and leaves weights quantized that are stored so.
        mesh: devices to spread the weights over (see `mesh`); each shard is read straight to its device.
        overrides: fields of `config.json` to replace, by name.
        quantize: weights to quantize while loading, one after the other on its device, like "target=int8,head=int8" or
            a mapping (see `quantize.parse_quantize`): the weights of products, one scale for each output. Weights that
            are stored quantized stay as they are, unless a `dtype` is named.

    Raises:
        ValueError: unsupported configuration, a mesh that its heads cannot be split over, or files that are missing,
            corrupt or do not match it.
    """
    array_type, quantised = parse_dtype(dtype), rule(parse_quantize(quantize), "target")
    directory = checkpoint.resolve(source, "target")
    config = read_target_config(directory, overrides)
    with files.reading(directory):
        reader = checkpoint.Reader(directory)
        config = config.with_tensors(reader.names())
        layout, dequantise = sharding.check_layout(config, mesh), dtype not in (None, "auto")
        params = read_params(reader, config, layout, mesh, array_type, dequantise=dequantise, quantise=quantised)
        decodable = decodable_tokens(directory, config.vocab_size)
    return Target(params, decodable, config=config, layout=layout, mesh=mesh, directory=str(directory))


def read_params(
    reader: checkpoint.Reader,
    config: TargetConfig,
    layout: Layout,
    mesh: AnyMesh | None,
    dtype: DTypeLike,
    *,
    dequantise: bool = False,
    quantise: Callable[[str], str | None] = lambda path: None,
) -> checkpoint.Params:
    """The parameters of a target from its tensors; see `checkpoint.load`."""
    family = models.family(config.model_type)
    unread = family.ignored(config)
    # GPTQ's files have biases of zeros where a layer has none.
    quantised_bias = lambda name: bool(config.storage.rules) and name.endswith(".bias")
    empty_bias = lambda name: quantised_bias(name) and not reader.read(name, None).any()
    return checkpoint.load(
        reader,
        family.tensors(config, layout),
        dtype,
        ignored=lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in unread) or empty_bias(name),
        place=sharding.placement(mesh),
        dequantise=dequantise,
        quantise=quantise,
    )
