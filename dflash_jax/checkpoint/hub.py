"""Checkpoint directories, local or from the hub."""

from pathlib import Path
from typing import Any

from dflash_jax import files
from dflash_jax.checkpoint import gguf


def resolve(source: str | Path, what: str) -> Path:
    """A local checkpoint directory: downloaded from the hub if `source` is a hub id, made from a GGUF file. A hub id
    may end with @ and a revision: a branch, a tag or a commit.

    Raises:
        ValueError: no directory, no GGUF file that can be used, no repository that can be downloaded.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and path.suffix == ".gguf":
        return gguf.unpack(path)
    if path.exists() or str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
        raise ValueError(
            f"{what} must be a checkpoint directory, a .gguf file or a hub id 'owner/name', got {source!s}"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = str(source).partition("@")
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{what} {source!s} is not a local directory and could not be downloaded from the hub: {reason}. Without "
            "network, copy the checkpoint and name its directory"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint; raises ValueError naming the file if there is none."""
    if not path.exists():
        raise ValueError(f"{path.parent} must hold {path.name}, found none; is this a checkpoint directory?")
    return files.read_json(path)


def read_config(directory: Path) -> dict[str, object]:
    """The object in a checkpoint's `config.json`, with what `hf_quant_config.json` beside it says of its weights."""
    raw, quantised = read_json(directory / "config.json"), directory / "hf_quant_config.json"
    if raw.get("quantization_config") or not quantised.is_file():
        return raw
    return {**raw, "quantization_config": {"quant_method": "modelopt", **read_json(quantised)}}
