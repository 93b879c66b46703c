"""A kind of drafter with a hyper-parameter of its own is one file, and needs no change elsewhere: this one."""

import json
from dataclasses import asdict, dataclass, make_dataclass
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.sharding import PartitionSpec as P

from dflash_jax import checkpoint, drafters, load_drafter, serve, sharding
from dflash_jax.drafters import dflash
from dflash_jax.drafters.config import DFlashConfig, dflash_fields
from dflash_jax.drafters.fields import Lookup, number
from dflash_jax.drafters.kind import Settings
from dflash_jax.mesh import WHOLE
from dflash_jax.sharding import Rule
from dflash_jax.train.__main__ import main
from dflash_jax.train.config import TrainConfig, make_config
from tests import tiny


@dataclass(frozen=True)
class SlottedConfig(DFlashConfig):
    slot_gain: float = 1.0


class Model(dflash.Model):
    """DFlash with a learned vector for each slot of the block."""

    def setup(self):
        super().setup()
        self.slots = self.param("slots", nn.initializers.zeros, (self.config.block_size, self.config.hidden_size))

    def final(self, x):
        return self.norm(x + self.config.slot_gain * self.slots[None, : x.shape[1]].astype(x.dtype))


class Drafter(dflash.Drafter):
    config: SlottedConfig = struct.field(pytree_node=False)
    model: ClassVar[type[nn.Module]] = Model


@dataclass(frozen=True)
class SlottedSettings(Settings):
    """Hyper-parameters of a new one.

    Attributes:
        slot_gain: scale of the vectors of the slots.
    """

    slot_gain: float = 2.0

    def __post_init__(self):
        self.check_positive()


class Slotted(dflash.DFlashKind[SlottedConfig, SlottedSettings]):
    name, architecture, classes, fields = "slotted", "SlottedDraftModel", r"SlottedDraftModel", ("slot_gain",)
    drafter, settings = Drafter, SlottedSettings
    rules = (Rule(r"slots", 2, P()),)

    def config(self, raw):
        return SlottedConfig(**dflash_fields(raw, self.fields), slot_gain=number(Lookup(raw), "slot_gain", default=1.0))

    def new_config(self, common, settings, taps=None):
        return {**super().new_config(common, settings, taps), **asdict(settings)}

    def initial(self, path, shape, config):
        return np.zeros(shape, np.float32) if path.endswith("slots") else None

    def tensors(self, config, layout=WHOLE):
        own = {"slots": checkpoint.copied("slots", config.block_size, config.hidden_size)}
        return super().tensors(config, layout) | own


@pytest.fixture
def registered():
    known, rules = dict(drafters.KINDS), list(sharding.RULES)
    drafters.register(Slotted())
    yield
    drafters.KINDS.clear()
    drafters.KINDS.update(known)
    sharding.RULES[:] = rules


def test_its_settings_are_those_of_a_run(registered):
    config = make_config({"drafter": "slotted", "slot_gain": 3})
    assert config.kind_settings == SlottedSettings(3.0)
    assert config.named()["slot_gain"] == 3.0
    assert "slot_gain" not in TrainConfig().named()
    with pytest.raises(ValueError, match="slot_gain must be positive, got -1"):
        make_config({"drafter": "slotted", "slot_gain": -1})
    with pytest.raises(ValueError, match="slot_gain must be float, got 'much'"):
        make_config({"drafter": "slotted", "slot_gain": "much"})
    with pytest.raises(ValueError, match="other hyper-parameters"):
        TrainConfig(drafter="dflash", kind_settings=SlottedSettings())


def test_it_has_a_name_of_its_own(registered):
    class Another(Slotted):
        pass

    again = Slotted()
    drafters.register(again)
    assert drafters.KINDS["slotted"] is again
    drafters.register(drafters.KINDS["dflash"])
    assert list(drafters.KINDS)[-1] == "dflash"  # it takes what names no class, so it is asked last
    with pytest.raises(ValueError, match="another kind of drafter named 'slotted'"):
        drafters.register(Another())
    assert drafters.kind_of({"architectures": ["SlottedDraftModel"]}) == "slotted"
    assert drafters.kind_of({"architectures": ["DFlashDraftModel"]}) == "dflash"


def test_a_setting_is_of_one_type(registered, monkeypatch):
    class Clashing(Slotted):
        name, settings = (
            "clashing",
            make_dataclass("Clashing", [("markov_rank", str, "a")], bases=(Settings,), frozen=True),
        )

    drafters.register(Clashing())
    with pytest.raises(ValueError, match="markov_rank of .* drafters is the name of another setting"):
        make_config({})


@pytest.mark.slow
def test_it_trains_saves_loads_exports_and_serves(registered, pair, tmp_path, capsys):
    answers, run, exported = tmp_path / "answers.jsonl", tmp_path / "run", tmp_path / "drafter"
    answers.write_text('{"prompt_token_ids": [1, 4], "response_token_ids": [2, 3, 4, 9, 8, 7, 6, 5, 4, 3]}\n' * 16)
    settings = "--num-layers 1 --block-size 4 --batch-size 2 --length 16 --anchors 4 --max-steps 3".split()
    fit = ["fit", "--target", str(pair / "target"), "--data", str(answers), *settings, "--output", str(run)]
    assert main([*fit, "--drafter", "slotted", "--slot-gain", "3", "--mask-token-id", str(tiny.MASK)]) == 0
    assert json.loads((run / "config.json").read_text())["slot_gain"] == 3.0
    assert main(["export", "--run", str(run), "--output", str(exported), "--dtype", "float32"]) == 0
    loaded = load_drafter(exported)
    assert (type(loaded), loaded.config.slot_gain) == (Drafter, 3.0)
    assert float(jnp.abs(loaded.params["slots"]).max()) > 0  # it was trained
    again = ["fit", "--target", str(pair / "target"), "--data", str(answers), *settings[4:]]
    assert main([*again, "--init-from", str(exported), "--output", str(tmp_path / "more")]) == 0
    capsys.readouterr()
    job = ["--target", str(pair / "target"), "--prompt", "a b c", "--max-new-tokens", "8"]
    assert serve.main([*job, "--no-speculation"]) == 0
    plain = capsys.readouterr().out
    assert serve.main([*job, "--drafter", str(exported)]) == 0
    assert capsys.readouterr().out == plain
