"""DFlash block-diffusion speculative decoding in JAX/Flax."""

import importlib
from typing import TYPE_CHECKING

from dflash_jax.version import __version__ as __version__

if TYPE_CHECKING:
    from dflash_jax.bundled import bundled_pair as bundled_pair
    from dflash_jax.decoding.proposal import Proposal as Proposal
    from dflash_jax.decoding.state import DraftModel as DraftModel
    from dflash_jax.decoding.state import State as State
    from dflash_jax.decoding.state import init_state as init_state
    from dflash_jax.decoding.step import Committed as Committed
    from dflash_jax.decoding.step import StepFunctions as StepFunctions
    from dflash_jax.decoding.step import make_choose as make_choose
    from dflash_jax.decoding.step import run as run
    from dflash_jax.decoding.step import speculative_step as speculative_step
    from dflash_jax.decoding.step import step_functions as step_functions
    from dflash_jax.drafters.base import Drafter as Drafter
    from dflash_jax.drafters.function import stateless as stateless
    from dflash_jax.drafters.loading import load_drafter as load_drafter
    from dflash_jax.drafters.ngram import Mixture as Mixture
    from dflash_jax.drafters.ngram import Ngram as Ngram
    from dflash_jax.infer.engine.engine import Engine as Engine
    from dflash_jax.infer.engine.engine_config import EngineConfig as EngineConfig
    from dflash_jax.infer.engine.params import SamplingParams as SamplingParams
    from dflash_jax.infer.engine.replay import Replay as Replay
    from dflash_jax.infer.engine.replay import replay as replay
    from dflash_jax.infer.engine.requests import Completion as Completion
    from dflash_jax.infer.engine.requests import Request as Request
    from dflash_jax.infer.engine.requests import RequestError as RequestError
    from dflash_jax.infer.engine.rollouts import Rollouts as Rollouts
    from dflash_jax.infer.engine.rollouts import rollouts as rollouts
    from dflash_jax.infer.generate import Generation as Generation
    from dflash_jax.infer.generate import begin_decoding as begin_decoding
    from dflash_jax.infer.generate import generate as generate
    from dflash_jax.infer.generate import spec_generate as spec_generate
    from dflash_jax.infer.text import Text as Text
    from dflash_jax.mesh import make_mesh as make_mesh
    from dflash_jax.mesh import parse_mesh as parse_mesh
    from dflash_jax.target import Target as Target
    from dflash_jax.target import load_target as load_target

# Imported on first use, so that `python -m dflash_jax.serve --help` need not import jax.
_PUBLIC_OF = {
    "bundled": "bundled_pair",
    "decoding.proposal": "Proposal",
    "decoding.state": "DraftModel State init_state",
    "decoding.step": "Committed StepFunctions make_choose run speculative_step step_functions",
    "drafters.base": "Drafter",
    "drafters.function": "stateless",
    "drafters.loading": "load_drafter",
    "drafters.ngram": "Mixture Ngram",
    "infer.engine.engine": "Engine",
    "infer.engine.engine_config": "EngineConfig",
    "infer.generate": "Generation begin_decoding generate spec_generate",
    "infer.engine.params": "SamplingParams",
    "infer.engine.replay": "Replay replay",
    "infer.engine.requests": "Completion Request RequestError",
    "infer.engine.rollouts": "Rollouts rollouts",
    "infer.text": "Text",
    "mesh": "make_mesh parse_mesh",
    "target": "Target load_target",
}
_PUBLIC = {name: module for module, names in _PUBLIC_OF.items() for name in names.split()}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str):
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"dflash_jax.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'dflash_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names not imported yet are there, too: for completion."""
    return sorted({*globals(), *__all__})
