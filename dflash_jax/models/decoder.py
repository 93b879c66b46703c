"""What most families share: the layer with norms before attention and MLP, and the decoder around the layers.

Shapes: B rows, T block positions, b t the same, or [B, N] where positions are packed (see `packing`),
D model width, V vocabulary, F tapped features.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.cache import Cache, Entry
from dflash_jax.config import LayerConfig, TargetConfig
from dflash_jax.mesh import Layout, on_every_device
from dflash_jax.models.attention import Attention, Pass, run_layers
from dflash_jax.models.experts import Experts
from dflash_jax.models.layers import MLP, parameter, project
from dflash_jax.models.norms import RMSNorm
from dflash_jax.sharding import gathered, lookup


class Layer(nn.Module):
    """A layer that norms what attention and the MLP read, and adds what they return. A family derives its own.

    Attributes:
        config: of the model.
        layer: of this layer.
        norm_class: of all its norms: `norm_class(size, epsilon)`.
    """

    norm_class: ClassVar[type[RMSNorm]] = RMSNorm

    config: TargetConfig
    layer: LayerConfig
    layout: Layout

    def attention(self) -> Callable[..., tuple[Array, Any]]:
        """The layer's attention: `Attention`, unless the family says otherwise."""
        return Attention(self.config.hidden_size, self.layer.attention, self.layout, self.norm_class, name="self_attn")

    def mlp(self, ctx: Pass) -> Callable[[Any], Float[Array, "B T D"]]:
        """The layer's MLP, or its experts."""
        D, layer = self.config.hidden_size, self.layer
        if layer.experts:
            return partial(Experts(D, layer.experts, self.layout, name="experts"), valid=ctx.valid)
        return MLP(D, layer.intermediate_size, self.layout, layer.mlp_bias, name="mlp")

    @nn.compact
    def __call__(
        self, x: Float[Array, "b t D"], ctx: Pass, entry: Entry, shared: Any
    ) -> tuple[Float[Array, "b t D"], Any]:
        attention, mlp = self.attention(), self.mlp(ctx)
        # Who reads nothing but products of what the norms return. Of packed positions XLA would write these twice.
        divides = [ctx.packing is None and isinstance(*of) for of in ((attention, Attention), (mlp, MLP))]
        norm = partial(self.norm_class, self.config.hidden_size, self.config.rms_norm_eps)
        before, after = norm(name="input_layernorm"), norm(name="post_attention_layernorm")
        h, x = before.for_products(x) if divides[0] else (before(x), x)
        h, fresh = attention(h, ctx, entry, shared)
        x = on_every_device(x + h)
        h, x = after.for_products(x) if divides[1] else (after(x), x)
        return on_every_device(x + mlp(h)), fresh


class Decoder(nn.Module):
    """Embedding, decoder layers, final norm and head. A family with a layer of its own derives its `Model` from it.

    Attributes:
        layer: the family's layer; see `run_layers` for what it is called with.
    """

    layer: ClassVar[type[Layer]] = Layer

    config: TargetConfig
    layout: Layout

    def setup(self):
        c, table = self.config, (self.config.vocab_size, self.config.hidden_size)
        self.embed_tokens = parameter(self, "embed_tokens", table, gather=False)
        self.layers = [self.layer(c, layer, self.layout) for layer in c.layers]
        self.norm = self.layer.norm_class(c.hidden_size, c.rms_norm_eps)
        if not c.tie_word_embeddings:
            self.lm_head = parameter(self, "lm_head", table, gather=False)

    def table(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Rows of the embedding table, as a drafter reads them."""
        return lookup(self.embed_tokens, tokens)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Embeddings as the first layer reads them: times the config's scale, in the table's dtype."""
        found = self.table(tokens)
        return found * jnp.asarray(self.config.embedding_scale, found.dtype)

    def forward(
        self, tokens: Int[Array, "b t"], ctx: Pass, cache: Cache, taps: tuple[int, ...]
    ) -> tuple[Float[Array, "b t D"], Float[Array, "b t FD"], tuple[Any, ...]]:
        """Returns normed hidden states, the outputs of the tapped layers side by side, and what is fresh."""
        x, features, fresh = run_layers(self.layers, self.config.layers, self.embed(tokens), ctx, cache, taps)
        return self.norm(x), features, fresh

    def head(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Float32 products with the head, as a drafter reads them."""
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return project(hidden, gathered(head, "lm_head"))

    def unembed(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Float32 logits of the target."""
        return self.head(hidden)
