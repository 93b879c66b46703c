"""What a kind of drafter is: everything of its own, in one object that is registered (see `drafters.register`)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Generic, TypeVar

import numpy as np

from dflash_jax import checkpoint
from dflash_jax.config import Raw
from dflash_jax.drafters import base
from dflash_jax.drafters.config import DrafterConfig
from dflash_jax.drafters.fields import Lookup, classes_of
from dflash_jax.mesh import WHOLE, Layout
from dflash_jax.sharding import Rule


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters of a new drafter that only its kind has.

    A kind derives a frozen dataclass of its own. Every field has a default, and is described in the docstring; it is a
    flag of `train fit` and a name in its settings.
    """

    def check_positive(self) -> None:
        """Raises ValueError if a number is not above 0."""
        for name, value in asdict(self).items():
            if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")


Config = TypeVar("Config", bound=DrafterConfig)
KindSettings = TypeVar("KindSettings", bound=Settings)


class Kind(Generic[Config, KindSettings]):
    """A kind of drafter.

    A kind must have `name`, `classes`, `drafter`, `config` and `tensors`, and to be trained `new_config`; the rest
    has a meaning that suits most.

    Attributes:
        name: of the kind, as `train fit --drafter` has it.
        classes: pattern of the names that published configs have in `architectures`.
        fields: fields of a `config.json` that no other kind has.
        aliases: beginnings of the names of tensors in published variants, and what stands there in `tensors`.
        drafter: the class of its drafters.
        settings: the class of its hyper-parameters.
        zeros: ends of the paths of new parameters that are zero, such as those with which it begins as DFlash.
        rules: how its parameters are split over a mesh, where no other rule says it.
        speculators: its `speculators_model_type`, and the class name that stands for it; None if that library has none.
    """

    name: ClassVar[str]
    classes: ClassVar[str]
    fields: ClassVar[tuple[str, ...]] = ()
    aliases: ClassVar[Mapping[str, str]] = {}
    drafter: ClassVar[type[base.Drafter]]
    settings: ClassVar[type[Settings]] = Settings
    zeros: ClassVar[tuple[str, ...]] = ()
    rules: ClassVar[tuple[Rule, ...]] = ()
    speculators: ClassVar[tuple[str, str] | None] = None

    def matches(self, raw: Raw) -> bool:
        """Whether a `config.json` names a class of this kind, or has one of its fields."""
        return any(re.fullmatch(self.classes, name) for name in classes_of(raw)) or any(map(Lookup(raw), self.fields))

    def config(self, raw: Raw) -> Config:
        """Reads `config.json`; raises ValueError for what is unknown or unsupported."""
        raise NotImplementedError

    def tensors(self, config: Config, layout: Layout = WHOLE) -> checkpoint.Table:
        """What every parameter is made of: tensors of a checkpoint, by the parameter's path."""
        raise NotImplementedError

    def canonical_name(self, name: str) -> str:
        """The name that a tensor of a published variant has in `tensors`."""
        for alias, ours in {**base.ALIASES, **self.aliases}.items():
            if name.startswith(alias):
                name = ours + name.removeprefix(alias)
        return name

    def from_speculators(self, fields: Raw) -> Raw:
        """Fields of a `config.json` by the `speculators` library, with what it leaves out."""
        return fields

    def new_config(self, common: Raw, settings: KindSettings, taps: Sequence[int] | None = None) -> Raw:
        """The `config.json` of a new drafter.

        Args:
            common: the fields of its layers, and where it stands in its target.
            settings: its hyper-parameters, of the class `settings`.
            taps: target layers that it taps; None leaves that to the kind.
        """
        raise NotImplementedError

    def config_from(self, config: DrafterConfig, raw: Raw, settings: KindSettings) -> Raw | None:
        """The `config.json` of a drafter of this kind that begins as one of another kind, with this `config` and
        `config.json`; None if it cannot."""
        return None

    def for_blocks(self, drafter: base.Drafter, block_size: int) -> base.Drafter:
        """A drafter for smaller blocks than its own, with the parameters that these need."""
        return drafter.replace(config=replace(drafter.config, block_size=block_size))

    def initial(self, path: str, shape: tuple[int, ...], config: Config) -> np.ndarray | None:
        """A new parameter; None if it is made as all others are (one in norms, zero in biases, else drawn)."""
        return np.zeros(shape, np.float32) if path.endswith(self.zeros) else None
