"""The configuration of a training run: the paper's recipe by default (method, section 8.3)."""

import contextlib
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}  # published; other sizes in between


@dataclass(frozen=True)
class TrainConfig:
    """What `fit` does.

    Attributes:
        block_size: slots of a draft pass, the anchor included.
        num_layers: depth of a new drafter; 1 up to the target's.
        target_layer_ids: tapped layers; empty takes the reference rule for the depths.
        mask_token_id: token of the masked slots; None takes the tokenizer's mask token, else the last
            embedding row no token uses.
        length: tokens of a packed row; longer sequences are cut.
        anchors: blocks drawn per conversation at each visit.
        anchor_placement: "random", drawn anew at each visit, or "fixed": every `block_size`-th answer token.
        row_anchors: blocks computed per packed row, of all its conversations; 0 takes half its tokens, or
            `anchors` if that is more.
        batch_size: packed rows per optimiser step.
        accumulate: parts a step's rows are processed in, one after the other; divides `batch_size`.
        epochs: visits of the data.
        max_steps: stops earlier; 0 does not.
        optimizer: "adamw", or "muon" for matrices with adamw for the rest.
        learning_rate: peak; of the matrices for muon, whose rest gets a tenth.
        schedule: "cosine", "wsd" (warmup, stable, decay over the last fifth) or "constant"; all warm up.
        warmup: share of the steps.
        final_learning_rate: share of the peak at the end.
        b1, b2, weight_decay, clip_norm: of the optimiser; clip_norm bounds the global gradient norm.
        gamma: decay of the loss weights over a block, exp(-(k - 1) / gamma); 0 takes the paper's value for
            the block size.
        weighting: "decay", or "dpace" (arXiv 2605.18810) with alpha 0.5.
        cross_entropy, kl, total_variation: coefficients of the losses against the data token, and against
            the target's own distribution.
        feature_noise: half width of uniform noise on the target features.
        remat: recompute draft layers in the backward pass instead of keeping their insides.
        loss_chunk: hidden states whose logits exist at the same time.
        seed: of initial weights, order and anchors.
        dtype: of the computation, "auto", "float32" or "bfloat16"; parameters are float32.
        log_every, save_every: steps between lines and checkpoints; save_every 0 saves at the end and before
            evaluations only.
        evaluate_every: steps between evaluations; 0 is a tenth of the run. Needs prompts to evaluate on.
        evaluate_samples, evaluate_max_new_tokens, evaluate_temperature: of an evaluation.
        keep: checkpoints kept.
    """

    block_size: int = 16
    num_layers: int = 5
    target_layer_ids: tuple[int, ...] = ()
    mask_token_id: int | None = None
    length: int = 3072
    anchors: int = 512
    anchor_placement: Literal["random", "fixed"] = "random"
    row_anchors: int = 0
    batch_size: int = 8
    accumulate: int = 1
    epochs: float = 6.0
    max_steps: int = 0
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 6e-4
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: float = 0.04
    final_learning_rate: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    gamma: float = 0.0
    weighting: Literal["decay", "dpace"] = "decay"
    cross_entropy: float = 1.0
    kl: float = 0.0
    total_variation: float = 0.0
    feature_noise: float = 0.0
    remat: bool = True
    loss_chunk: int = 2048
    seed: int = 0
    dtype: str = "auto"
    log_every: int = 10
    save_every: int = 500
    evaluate_every: int = 0
    evaluate_samples: int = 24
    evaluate_max_new_tokens: int = 160
    evaluate_temperature: float = 0.0
    keep: int = 2

    def __post_init__(self):
        positive = "num_layers length anchors batch_size accumulate epochs learning_rate loss_chunk log_every keep "
        positive += "clip_norm evaluate_samples evaluate_max_new_tokens"
        for name in positive.split():
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        not_negative = (
            "row_anchors max_steps weight_decay gamma cross_entropy kl total_variation feature_noise save_every "
            "evaluate_every evaluate_temperature seed"
        )
        for name in not_negative.split():
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in 0..1, 1 excluded, got {getattr(self, name)}")
        for name in ("warmup", "final_learning_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share and must lie in 0..1, got {getattr(self, name)}")
        if self.block_size < 2:
            raise ValueError(f"block_size must be at least 2 (an anchor and a mask), got {self.block_size}")
        if self.batch_size % self.accumulate:
            raise ValueError(f"accumulate {self.accumulate} must divide batch_size {self.batch_size}")
        if self.cross_entropy + self.kl + self.total_variation == 0:
            raise ValueError("all losses are off: set cross_entropy, kl or total_variation")

    @property
    def blocks(self) -> int:
        """Blocks of a packed row."""
        return min(self.length, self.row_anchors or max(self.anchors, self.length // 2))

    @property
    def decay(self) -> float:
        """Gamma of the loss weights."""
        if self.gamma:
            return self.gamma
        return _GAMMA.get(self.block_size, max(1.0, 4.0 + 3.0 * (self.block_size - 8) / 8))


def read_config(path: str | Path | None, overrides: dict[str, Any] | None = None) -> TrainConfig:
    """`make_config` of `read_settings`."""
    return make_config(read_settings(path, overrides))


def read_settings(path: str | Path | None, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """Reads a YAML or JSON file of `TrainConfig` fields; `overrides` win. Raises ValueError if it is unreadable."""
    given: dict[str, Any] = {}
    if path is not None:
        import yaml

        try:
            given = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}  # JSON is YAML, too
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} must be YAML or JSON: {str(error).splitlines()[0]}") from error
        if not isinstance(given, dict):
            raise ValueError(f"{path} must hold named settings, got {type(given).__name__}")
    return given | (overrides or {})


def make_config(given: dict[str, Any]) -> TrainConfig:
    """Checked settings.

    Raises:
        ValueError: an unknown field (with the known ones), or a value of the wrong type or out of range.
    """
    fields = {field.name: field.type for field in dataclasses.fields(TrainConfig)}
    if unknown := [name for name in given if name not in fields]:
        raise ValueError(f"unknown settings {', '.join(map(str, unknown))}; known are {', '.join(fields)}")
    return TrainConfig(**{name: _typed(name, value, fields[name]) for name, value in given.items()})


def _typed(name: str, value: Any, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
        return value
    if name == "target_layer_ids":
        if not isinstance(value, list | tuple) or not all(type(i) is int for i in value):
            raise ValueError(f"{name} must be a list of layer numbers, got {value!r}")
        return tuple(value)
    if name == "mask_token_id" and value is None:
        return None
    if kind is float and isinstance(value, str):  # YAML reads 6e-4 as text
        with contextlib.suppress(ValueError):
            value = float(value)
    expected = {float: (int, float), bool: (bool,), str: (str,)}.get(kind, (int,))
    if type(value) not in expected or (kind is float and not abs(value) < math.inf):
        raise ValueError(f"{name} must be {getattr(kind, '__name__', 'int')}, got {value!r}")
    return float(value) if kind is float else value
