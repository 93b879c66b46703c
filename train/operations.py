"""How many operations a training step asks for, and what share of a device's it gets."""

import math
from typing import Any

import jax

from dflash_jax.chips import chip_of
from dflash_jax.config import AttentionConfig
from dflash_jax.drafters.base import Drafter
from dflash_jax.quantised import Quantised
from dflash_jax.target import Target
from dflash_jax.train.config import TrainConfig


def operations(config: TrainConfig, target: Target, drafter: Drafter, params: Any, *, cached: bool = False) -> float:
    """Operations of the products with weights in one step, two for a multiplication and an addition.

    It is what the model asks for, so layers that are computed again, and attention, are not counted: the forward pass
    of the target, three times that of the drafter, and twice that of the head, once for the logits and once for the
    gradient by the states.

    Args:
        params: trained parameters.
        cached: whether the target's features come from disk.
    """
    blocks, block_size = config.batch_size * config.blocks, config.block_size
    known = drafter.vocabulary
    head = (target.config.vocab_size if known is None else known.shape[0]) * target.config.hidden_size
    body = 0 if cached else 2 * _active(target) * config.batch_size * config.length
    return body + 3 * trained_operations(config, drafter, params) + 4 * head * blocks * drafter.depth(block_size)


def trained_operations(config: TrainConfig, drafter: Drafter, params: Any) -> float:
    """Operations of one forward pass of the drafter in a step, but those of attention and the head."""
    leaves = [(tuple(key.key for key in path), x) for path, x in jax.tree_util.tree_leaves_with_path(params)]
    of_weight = lambda path, x: math.prod(x.shape) * drafter.uses(path)
    trained = sum(of_weight(*leaf) for leaf in leaves if leaf[0][-1] not in drafter.by_token)  # not looked up
    return 2 * trained * config.batch_size * config.blocks * config.block_size


def attention_operations(config: TrainConfig, drafter: Drafter, *, again: bool) -> float:
    """Operations of the drafter's attention in a step, if every row is one document and anchors lie anywhere in it.

    Args:
        again: whether the backward pass computes layers again.
    """
    queries = config.batch_size * config.blocks * config.block_size
    products = 2 + 7 + (2 if again else 0)  # forward, backward (scores twice), and forward again
    layers = [mixer for mixer in drafter.config.mixers if isinstance(mixer, AttentionConfig)]
    seen = lambda layer: min(config.length / 2, layer.window or math.inf) + config.block_size
    pairs = sum(layer.num_heads * layer.head_dim * seen(layer) for layer in layers)
    return 2 * products * queries * pairs


def _active(target: Any) -> float:
    """Parameters of the layers that a token meets: of the experts, those that it is sent to."""
    share = next((x.experts.num_experts_per_tok / x.experts.num_experts for x in target.config.layers if x.experts), 1)

    def one(path: Any, leaf: Any) -> float:
        names = [key.key for key in path if hasattr(key, "key")]
        if names[0] in ("embed_tokens", "lm_head"):
            return 0
        return math.prod(leaf.shape) * (share if "experts" in names else 1)

    whole = lambda x: isinstance(x, Quantised)
    return sum(jax.tree.leaves(jax.tree_util.tree_map_with_path(one, target.params, is_leaf=whole)))


def share_of_peak(rate: float, devices: int = 1) -> float | None:
    """What share of the published operations of so many devices this many a second are, or None where they are not
    known."""
    chip = chip_of(jax.devices()[0].device_kind)
    return None if chip is None else rate / (devices * chip.flops)
