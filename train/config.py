"""The configuration of a training run: the paper's recipe by default (method, section 8.3)."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, get_args, get_origin

from dflash_jax.files import reading

if TYPE_CHECKING:
    from dflash_jax.drafters import AnyKind
    from dflash_jax.drafters.kind import Settings

_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}  # published; other sizes in between


class NotFiniteError(RuntimeError):
    """The loss or a gradient became infinite or NaN; the last good state is saved."""


class StageError(RuntimeError):
    """A stage that is run by another one failed; it has said why."""


class Coefficients(NamedTuple):
    """What of a prediction's losses counts, against q, what the drafter says, and p, what the target does.

    Attributes:
        cross_entropy: -log q(label).
        kl: KL(p || q).
        total_variation: sum over the vocabulary of |p - q| (as DSpark has it): twice the share that is rejected.
        negative_log_acceptance: -log of the acceptance, the sum over the vocabulary of min(p, q) (arXiv 2602.23881).
        lk_hybrid: w KL(p || q) + (1 - w) times the rejected share, w = exp(-3 acceptance) without a gradient (arXiv
            2602.23881).
    """

    cross_entropy: float = 1.0
    kl: float = 0.0
    total_variation: float = 0.0
    negative_log_acceptance: float = 0.0
    lk_hybrid: float = 0.0

    @property
    def distill(self) -> bool:
        """Whether the target's own distribution is needed."""
        return any(self[1:])


@dataclass(frozen=True)
class TrainConfig:
    """What `fit` does.

    Attributes:
        drafter: kind of a new drafter (docs/drafters.md). With --init-from, a drafter may become one of a kind that
            builds on its own.
        kind_settings: hyper-parameters that only the kind has; by default, the kind's own.
        block_size: draft length plus 1; the draft length of kinds whose anchor predicts, too.
        num_layers: layers of a new drafter; at most those of the target.
        target_layer_ids: target layers whose hidden states the drafter reads; empty spreads them as the reference does.
        mask_token_id: mask token; None takes that of the tokenizer, else the last row of the embedding that no token
            uses.
        draft_vocab_size: draft vocabulary of a new drafter: the tokens that are most frequent in the answers; 0 is all.
        length: tokens of a packed sequence; longer conversations are cut.
        anchors: blocks drawn per conversation in each epoch.
        anchor_placement: where blocks begin: "random", drawn anew in each epoch; "fixed", at every `block_size`-th
            answer token; or "decoded", where steps began when the answers were regenerated with a drafter.
        row_anchors: blocks per packed sequence, over all its conversations; 0 takes half its tokens, or `anchors` if
            that is more.
        batch_size: packed sequences per optimizer step.
        accumulate: gradient accumulation: micro-batches per optimizer step; divides `batch_size`.
        epochs: passes over the data.
        max_steps: maximum number of optimizer steps; 0 sets no limit.
        optimizer: "adamw", or "muon" for matrices with adamw for the rest.
        learning_rate: peak learning rate; with muon that of the matrices, the rest gets a tenth.
        schedule: learning rate schedule: "cosine", "wsd" (warm-up, stable, decay over the last fifth) or "constant";
            all warm up.
        warmup: warm-up, as a fraction of the steps.
        final_learning_rate: learning rate at the end, as a fraction of the peak.
        b1: Adam beta1.
        b2: Adam beta2.
        weight_decay: weight decay.
        moments: dtype of the optimizer state: "float32", or "bfloat16", which saves half of its memory and traffic.
        clip_norm: maximum of the global gradient norm.
        gamma: decay of the loss weights over a block, exp(-(k - 1) / gamma); 0 takes the paper's value for the block
            size.
        weighting: loss weights over a block: "decay", or "dpace" (arXiv 2605.18810) with alpha 0.5.
        cross_entropy: coefficient of the cross-entropy with the data tokens.
        kl: coefficient of the KL divergence from the target's distribution.
        total_variation: coefficient of the total variation distance from the target's distribution; alone it hardly
            learns from scratch.
        negative_log_acceptance: coefficient of -log of the acceptance rate (arXiv 2602.23881).
        lk_hybrid: coefficient of the mixture of KL divergence and rejection rate of arXiv 2602.23881.
        feature_noise: half width of uniform noise on the target features.
        remat: activation checkpointing of the draft layers; "auto" turns it on where their activations do not fit in
            memory, and on CPU.
        loss_chunk: tokens per chunk when logits are computed.
        round_logit_gradients: round the gradient of the logits to the dtype of the computation before its products,
            which are several times as fast in bfloat16.
        seed: random seed of initial weights, order and anchors.
        dtype: dtype of the computation: "auto", "float32" or "bfloat16"; parameters are float32.
        log_every: steps between log lines.
        save_every: steps between checkpoints; 0 saves at the end and before evaluations only.
        evaluate_every: steps between evaluations; 0 is a tenth of the run. Needs prompts to evaluate on.
        evaluate_samples: number of prompts of an evaluation.
        evaluate_max_new_tokens: maximum number of tokens per answer of an evaluation.
        evaluate_temperature: sampling temperature of an evaluation; 0 is greedy.
        keep: maximum number of checkpoints to keep.
    """

    drafter: str = "dflash"
    kind_settings: "Settings" = field(default_factory=lambda: _no_settings())
    block_size: int = 16
    num_layers: int = 5
    target_layer_ids: tuple[int, ...] = ()
    mask_token_id: int | None = None
    draft_vocab_size: int = 0
    length: int = 3072
    anchors: int = 512
    anchor_placement: Literal["random", "fixed", "decoded"] = "random"
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
    moments: Literal["float32", "bfloat16"] = "float32"
    clip_norm: float = 1.0
    gamma: float = 0.0
    weighting: Literal["decay", "dpace"] = "decay"
    cross_entropy: float = 1.0
    kl: float = 0.0
    total_variation: float = 0.0
    negative_log_acceptance: float = 0.0
    lk_hybrid: float = 0.0
    feature_noise: float = 0.0
    remat: bool | Literal["auto"] = "auto"
    loss_chunk: int = 2048
    round_logit_gradients: bool = True
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
        settings = _kind(self.drafter).settings
        if self.kind_settings == _no_settings():
            object.__setattr__(self, "kind_settings", settings())
        if type(self.kind_settings) is not settings:
            raise ValueError(f"a {self.drafter} drafter has other hyper-parameters than {self.kind_settings}")
        positive = "num_layers length anchors batch_size accumulate epochs learning_rate loss_chunk log_every keep "
        positive += "clip_norm evaluate_samples evaluate_max_new_tokens"
        not_negative = "row_anchors max_steps weight_decay gamma cross_entropy kl total_variation lk_hybrid seed "
        not_negative += "negative_log_acceptance feature_noise save_every evaluate_every evaluate_temperature "
        not_negative += "draft_vocab_size"
        for names, fits, what in (
            (positive, lambda x: x > 0, "must be positive"),
            (not_negative, lambda x: x >= 0, "must not be negative"),
            ("b1 b2", lambda x: 0 <= x < 1, "must lie in 0..1, 1 excluded"),
            ("warmup final_learning_rate", lambda x: 0 <= x <= 1, "is a share and must lie in 0..1"),
        ):
            for name in names.split():
                if not fits(getattr(self, name)):
                    raise ValueError(f"{name} {what}, got {getattr(self, name)}")
        if self.moments == "bfloat16" and self.b2 > 0.99:
            raise ValueError(f"moments bfloat16 needs b2 of at most 0.99, or the averages stand still; got {self.b2}")
        if self.block_size < 2:
            raise ValueError(f"block_size must be at least 2 (an anchor and a mask), got {self.block_size}")
        if self.batch_size % self.accumulate:
            raise ValueError(f"accumulate {self.accumulate} must divide batch_size {self.batch_size}")
        if not any(self.losses):
            raise ValueError(f"all losses are off: at least one must be above 0 of {', '.join(Coefficients._fields)}")

    def named(self) -> dict[str, Any]:
        """All settings by their names, those of the kind among them."""
        common = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "kind_settings"
        }
        return common | dataclasses.asdict(self.kind_settings)

    @property
    def losses(self) -> Coefficients:
        """Coefficients of the losses."""
        return Coefficients(*(getattr(self, name) for name in Coefficients._fields))

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


def _no_settings() -> "Settings":
    from dflash_jax.drafters.kind import Settings

    return Settings()


def _kind(name: str) -> "AnyKind":
    from dflash_jax.drafters import kind_named

    return kind_named(name)


def setting_fields(kinds: bool = True) -> dict[str, dataclasses.Field[Any]]:
    """The fields of all settings by their names: of a run, and, with `kinds`, of every kind of drafter."""
    found = {field.name: field for field in dataclasses.fields(TrainConfig) if field.name != "kind_settings"}
    if kinds:
        from dflash_jax.drafters import KINDS

        for kind in KINDS.values():
            for field in dataclasses.fields(kind.settings):
                if field.name in found and found[field.name].type != field.type:
                    raise ValueError(f"{field.name} of {kind.name} drafters is the name of another setting; rename it")
                found[field.name] = field
    return found


def read_settings(path: str | Path | None, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """Reads a YAML or JSON file of settings by name; `overrides` win.

    Raises:
        ValueError: it is unreadable, or these are not the settings of a run.
    """
    given: dict[str, Any] = {}
    if path is not None:
        import yaml

        with reading(Path(path)):
            try:
                given = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}  # JSON is YAML, too
            except (yaml.YAMLError, UnicodeDecodeError) as error:
                raise ValueError(f"{path} must be YAML or JSON: {str(error).splitlines()[0]}") from error
            if not isinstance(given, dict):
                raise ValueError(f"{path} must hold named settings, got {type(given).__name__}")
            _checked(given)
    merged = given | (overrides or {})
    try:
        make_config(merged)
    except ValueError:
        if path is not None:
            with reading(Path(path)):
                make_config(given)  # if it is the file that is wrong, it is named
        raise
    return merged


def make_config(given: Mapping[str, Any]) -> TrainConfig:
    """Checked settings.

    Raises:
        ValueError: an unknown field (with the known ones), or a value of the wrong type or out of range.
    """
    checked, of_run = _checked(given), {field.name for field in dataclasses.fields(TrainConfig)}
    settings = _kind(checked.get("drafter", TrainConfig.drafter)).settings
    of_kind = {field.name for field in dataclasses.fields(settings)}
    kind_settings = settings(**{name: value for name, value in checked.items() if name in of_kind})
    return TrainConfig(
        kind_settings=kind_settings, **{name: value for name, value in checked.items() if name in of_run}
    )


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name, each as the type of its field; raises ValueError."""
    known = setting_fields()
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"unknown settings {', '.join(map(str, unknown))}; known are {', '.join(known)}")
    return {name: setting(name, value) for name, value in given.items()}


def setting(name: str, value: Any) -> Any:
    """A value as YAML reads it, as the type of its field; what stands for that on a command line does so here.

    Raises:
        ValueError: it is none.
    """
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    kind: Any = setting_fields()[name].type
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, set()))
    assert isinstance(spec, PrimitiveConstructorSpec)
    words = [str(part) for part in (value if isinstance(value, list | tuple) else [value])]
    try:
        if len(words) != spec.nargs != "*":
            raise ValueError(f"{len(words)} values")
        if spec.choices is not None and words[0] not in spec.choices:
            raise ValueError(f"not one of {', '.join(spec.choices)}")
        made = spec.instance_from_str(words)
        if isinstance(made, float) and not math.isfinite(made):
            raise ValueError("not finite")
    except ValueError as error:
        choices = "one of " + ", ".join(get_args(kind)) if get_origin(kind) is Literal else _type_name(kind)
        raise ValueError(f"{name} must be {choices}, got {value!r:.200}") from error
    return made


def _type_name(kind: Any) -> str:
    if get_origin(kind) in (Literal, Union, UnionType):
        return " or ".join(part if isinstance(part, str) else _type_name(part) for part in get_args(kind))
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
