"""The stage `export`: a run's drafter as a directory for this package and the official one, with a model card."""

from pathlib import Path

from dflash_jax.config import parse_dtype
from dflash_jax.train.arguments import ExportOptions
from dflash_jax.train.card import card
from dflash_jax.train.drafters import save_drafter, save_speculators
from dflash_jax.train.run import load_run


def main(options: ExportOptions) -> int:
    """Runs the stage; returns its exit status."""
    if Path(options.output).exists():
        raise ValueError(f"{options.output} exists; choose a new directory")
    drafter, raw = load_run(options.run, options.step)
    speculators = options.format == "speculators"
    save = save_speculators if speculators else save_drafter
    save(options.output, drafter, raw, parse_dtype(options.dtype))
    text = card(drafter, raw, Path(options.run), options.license, options.data_name, speculators=speculators)
    (Path(options.output) / "README.md").write_text(text, encoding="utf-8")
    print(f"wrote {options.output}")
    return 0
