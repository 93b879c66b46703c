"""The pictures of README and docs, drawn from figures that stand beside them.

    python -m dflash_jax.benchmarks.pictures --directory docs/figures

draws `answer.svg` from `answer.json`, `speed.svg` from all `speed-*.json` (figures of `benchmark compare --json`),
`sweep.svg` from `sweep.json`, and a terminal from each `*.txt`, which has a command and what it printed. With `--prompt
TEXT`, the bundled pair first answers it, for `answer.json`.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated

from dflash_jax import files
from dflash_jax.benchmarks.arguments import Figures
from dflash_jax.benchmarks.plots import new_figure, plot_sweep
from dflash_jax.cli import optional
from dflash_jax.infer.interrupt import exit_quietly, exit_status
from dflash_jax.parsing import parse

COLOURS = "#cfe8ff", "#d9f2d0", "#ffe7b8", "#f6d5e8", "#dcd8fb"
COLUMNS, CHARACTER, LINE, ROW, MARGIN = 84, 8.4, 26, 20, 16  # characters of a line; the rest in pixels
COMMAND = ' fill="#7ee787" font-weight="bold"'


@dataclass(frozen=True)
class PictureOptions:
    """Draws the pictures of README and docs from the figures beside them.

    Attributes:
        directory: where figures and pictures lie
        prompt: first answer this with the bundled pair, for answer.json
    """

    directory: Path = Path("docs/figures")
    prompt: Annotated[str | None, optional(str, "TEXT")] = None


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(
        PictureOptions, argv, prog="python -m dflash_jax.benchmarks.pictures", description=str(PictureOptions.__doc__)
    )
    return exit_status(lambda: _drawn(options.directory, options.prompt))


def _drawn(folder: Path, prompt: str | None) -> int:
    if prompt is not None:
        files.write_json(folder / "answer.json", answered(prompt))
    read = lambda path: json.loads(path.read_text())
    if (found := folder / "answer.json").exists():
        (folder / "answer.svg").write_text(answer_picture(read(found)))
    if speeds := sorted(folder.glob("speed-*.json")):
        plot_speeds([read(path) for path in speeds], folder / "speed.svg")
    if (found := folder / "sweep.json").exists():
        plot_sweep(read(found), folder / "sweep.svg")
    for found in folder.glob("*.txt"):
        found.with_suffix(".svg").write_text(terminal_picture(found.read_text()))
    return 0


def answered(prompt: str) -> Figures:
    """The bundled pair's answer: tokens and text of each step, of which the first is the end of reading the prompt."""
    from dflash_jax import bundled_pair, load_drafter, load_target, spec_generate
    from dflash_jax.infer.text import GrowingText, Text

    target_directory, drafter_directory = bundled_pair()
    target, drafter = load_target(target_directory), load_drafter(drafter_directory)
    text = Text(target.directory)
    done = spec_generate(target, drafter, text.encode_chat([{"role": "user", "content": prompt}]), max_new_tokens=256)
    tokens, lengths = done.tokens[0], done.acceptance_lengths[0]
    growing, steps, at = GrowingText(text), [], 0
    for count in (1, *lengths):
        steps.append([count, growing.add(tokens[at : at + count])])
        at += count
    steps[-1][1] += growing.end(tokens)
    return {"prompt": prompt, "steps": steps, "tau": sum(lengths) / len(lengths)}


def answer_picture(answer: Figures) -> str:
    """SVG: a text in which the tokens of each step have one color."""
    x, y, body = 0, 0, []
    for number, (count, piece) in enumerate(answer["steps"]):
        title = f"step {number}: {count} tokens" if number else "from reading the prompt"
        for word in _pieces(piece):
            if x + len(word) > COLUMNS and word != "\n":
                x, y = 0, y + 1
                word = word.lstrip(" ")
            if word == "\n":
                x, y = 0, y + 1
                continue
            left, top = MARGIN + x * CHARACTER, MARGIN + y * LINE
            body.append(
                f'<g><title>{title}</title><rect x="{left:.1f}" y="{top}" width="{len(word) * CHARACTER:.1f}" '
                f'height="{LINE - 5}" fill="{COLOURS[number % len(COLOURS)]}"/>'
                f'<text x="{left:.1f}" y="{top + 15}" textLength="{len(word) * CHARACTER:.1f}" xml:space="preserve">'
                f"{escape(word)}</text></g>"
            )
            x += len(word)
    width, height = 2 * MARGIN + COLUMNS * CHARACTER, 2 * MARGIN + (y + 1) * LINE - 5
    return _svg(width, height, "#1c1d1f", "#ffffff", body)


def _pieces(text: str) -> list[str]:
    """Words, each with the blanks before it, and line ends, of which it is made."""
    return re.findall(r"\n| *[^ \n]+| +", text)


def terminal_picture(printed: str) -> str:
    """SVG: a terminal with these lines; those of a prompt (`$`) stand out."""
    lines = printed.splitlines()
    width = 2 * MARGIN + max(map(len, lines)) * CHARACTER
    height = 2 * MARGIN + len(lines) * ROW
    body = (
        f'<text x="{MARGIN}" y="{MARGIN + 14 + i * ROW}" textLength="{len(line) * CHARACTER:.1f}" xml:space="preserve"'
        f"{COMMAND if line.startswith('$ ') else ''}>{escape(line)}</text>"
        for i, line in enumerate(lines)
        if line
    )
    return _svg(width, height, "#d6d9de", "#16181d", body)


def _svg(width: float, height: float, ink: str, paper: str, body: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14" '
        f'fill="{ink}"><rect width="100%" height="100%" rx="8" fill="{paper}"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def plot_speeds(figures: Sequence[Figures], path: Path) -> None:
    """How many times as fast as autoregressive decoding each was in its own run, with tau above the bars."""
    figure = new_figure(7, 3.2)
    axes = figure.add_subplot()
    ordered = sorted(figures, key=lambda one: (one["tree"], one["block_size"]))
    named = lambda one: f"tree of\n{one['tree']}" if one["tree"] else f"block\n{one['block_size']}"
    heights = [1.0, *(one["speedup"] for one in ordered)]
    colours = ["#9aa0a8", *["#1f6feb"] * len(ordered)]
    bars = axes.bar(["one token\na step", *map(named, ordered)], heights, color=colours, width=0.65)
    axes.bar_label(
        bars, ["", *(f"{one['speedup']:.2f} x\nτ {one['tau']:.1f}" for one in ordered)], padding=2, fontsize=9
    )
    axes.set_ylabel("speed")
    axes.set_ylim(0, 1.3 * max(heights))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    exit_quietly(main())
