"""Models of a configuration with random weights, for measurements that need no text."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dflash_jax import checkpoint, drafters, models, sharding
from dflash_jax.config import Raw
from dflash_jax.drafters.base import Drafter
from dflash_jax.mesh import AnyMesh
from dflash_jax.quantised import quantised
from dflash_jax.quantize import Quantize, parse_quantize, rule
from dflash_jax.target import Target

Pair = tuple[Raw, Raw] | tuple[Raw, Raw, Mapping[str, str]]  # configurations, and what is quantized


def random_pair(
    target: Raw,
    drafter: Raw,
    quantize: Quantize = None,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    mesh: AnyMesh | None = None,
) -> tuple[Target, Drafter]:
    """A pair of these configurations with random weights, in the shapes they have on a mesh; `jax.eval_shape` of it
    gives the shapes alone.

    Args:
        quantize: see `load_target`.

    Raises:
        ValueError: a configuration is unsupported, or the two do not belong together.
    """
    how = parse_quantize(quantize)
    first = random_target(target, dtype, mesh, how)
    draft_config = drafters.drafter_config(drafter, first.config.num_hidden_layers)
    if draft_config.draft_vocab_size != draft_config.vocab_size:
        draft_config = dataclasses.replace(draft_config, own_head=True)
    draft_config.check_pair(first.config)
    sharding.check_layout(draft_config, mesh)
    kind = drafters.KINDS[drafters.kind_of(drafter)]
    second = _random(kind.tensors(draft_config, first.layout), dtype, rule(how, "drafter"))
    return first, kind.drafter(second, draft_config, layout=first.layout, mesh=mesh)


def random_target(
    raw: Raw, dtype: DTypeLike = jnp.bfloat16, mesh: AnyMesh | None = None, quantize: Quantize = None
) -> Target:
    """A target of this configuration with random weights, in the shapes they have on a mesh.

    Raises:
        ValueError: the configuration is unsupported.
    """
    config = models.target_config(raw)
    layout = sharding.check_layout(config, mesh)
    how = rule(parse_quantize(quantize), "target")
    weights = _random(models.family(config.model_type).tensors(config, layout), dtype, how)
    return Target(weights, config=config, layout=layout, mesh=mesh)


def _random(
    table: checkpoint.Table, dtype: DTypeLike, quantize: Callable[[str], str | None] = lambda path: None
) -> dict[str, Any]:
    """Matrices N(0, 1 / width), norms one. Quantized ones are about as large, whatever their bits."""
    params: dict[str, Any] = {}
    for seed, (path, leaf) in enumerate(checkpoint.leaves(table)):
        key, kind = jax.random.key(seed), jnp.dtype(dtype if leaf.dtype in (None, "stored") else leaf.dtype)
        scale = leaf.shape[-1] ** -0.5
        if path.endswith(("/zero", "/gain", "/order")):
            params[path] = jnp.arange(leaf.shape[-1]) if "order" in path else jnp.full(leaf.shape, 8, kind)
        elif "norm" in path:
            params[path] = jnp.ones(leaf.shape, kind)
        elif jnp.issubdtype(kind, jnp.integer):  # of MXFP4 and INT4: several numbers, or exponents
            bits = jax.random.bits(key, leaf.shape, jnp.dtype(f"uint{8 * kind.itemsize}"))
            exponents = path.endswith("/scale")
            params[path] = jnp.full(leaf.shape, 120, kind) if exponents else jax.lax.bitcast_convert_type(bits, kind)
        elif path.endswith("/scale"):
            params[path] = jnp.full(leaf.shape, scale, kind)
        else:
            plain = not path.endswith("/values")
            params[path] = (jax.random.normal(key, leaf.shape, dtype) * (scale if plain else 1.0)).astype(kind)
        if leaf.product and (how := quantize(path)):
            params[path] = quantised(params[path], how)
    return checkpoint.nested(params, table, dtype)


def placed(tree: Any, shardings: Any) -> Any:
    """Shapes with where each array lies."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)
