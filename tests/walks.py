"""How far it is from a command to a kernel: `python -m tests.walks` prints every call between the two.

A walk is the Python stack at the moment in which a program is traced and an attention kernel is called. Only functions
of this package count. List comprehensions and generators do not: later versions of Python run some without a call. The
walk ends in the kernel's `api.py`; the implementation that this calls is not counted.

    verify   `serve --prompt`, from `serve.main` to the attention of the target, in a step
    draft    the same, to the attention of the drafter
    target   `train fit`, from `train.__main__.main` to the attention of the target, which makes the features
    blocks   the same, to the attention of the drafter's training blocks

Nothing is decoded or trained: a command is stopped when its walks are known.
"""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import jax

import dflash_jax
from dflash_jax import bundled_pair, serve, speculative_step
from dflash_jax.train import __main__ as train

PACKAGE = f"{Path(dflash_jax.__file__).parent}/"


class Hop(NamedTuple):
    """One call: the file inside the package, and the function."""

    file: str
    function: str


class Walk(NamedTuple):
    """Where a walk leads.

    Attributes:
        begin: the function whose call is the first hop.
        step: a function that it passes.
        drafting: whether it passes the folder of the drafters; it must not if this is False.
        kernel: the folder of the kernel at its end.
    """

    begin: Callable[..., Any]
    step: Callable[..., Any]
    drafting: bool
    kernel: str


class _AllSeen(BaseException):
    """Ends a command whose walks are known; a handler of errors does not catch it."""


SERVING = {
    "verify": Walk(serve.main, speculative_step, False, "kernels/block_attention"),
    "draft": Walk(serve.main, speculative_step, True, "kernels/block_attention"),
}
TRAINING = {
    "target": Walk(train.main, train.main, False, "kernels/block_attention"),
    "blocks": Walk(train.main, train.main, True, "kernels/anchored_attention"),
}


def serving_walks(target: Path, drafter: Path) -> dict[str, list[Hop]]:
    """The hops of `verify` and `draft`."""
    command = ["--target", str(target), "--drafter", str(drafter), "--prompt", "a"]
    return _recorded(lambda: serve.main(command), SERVING)


def training_walks(target: Path) -> dict[str, list[Hop]]:
    """The hops of `target` and `blocks`."""
    row = {"prompt_token_ids": [5] * 8, "response_token_ids": [7] * 24, "loss_mask": [0] * 8 + [1] * 24}
    sizes = "--length 64 --batch-size 1 --num-layers 2 --block-size 4 --anchors 4 --row-anchors 4 --max-steps 1"
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "answers.jsonl"
        data.write_text(json.dumps(row) + "\n")
        command = ["--target", str(target), "--data", str(data), "--output", f"{directory}/run", *sizes.split()]
        return _recorded(lambda: train.main(["fit", *command]), TRAINING)


def _recorded(command: Callable[[], object], wanted: dict[str, Walk]) -> dict[str, list[Hop]]:
    """The hops of the walks that a command takes.

    Raises:
        RuntimeError: the command ended, and a walk was not among its calls.
    """
    found: dict[str, list[Hop]] = {}

    def on_call(frame: FrameType, event: str, _: object) -> None:
        file = _file(frame.f_code)
        if event != "call" or frame.f_code.co_name != "attend" or file is None or file.endswith("/api.py"):
            return
        codes = _callers(frame)
        for name, walk in wanted.items():
            if name not in found and file.startswith(f"{walk.kernel}/"):
                found.update({name: hops} if (hops := _hops(walk, codes)) else {})
        if found.keys() == wanted.keys():
            sys.setprofile(None)
            raise _AllSeen

    jax.clear_caches()  # what was traced before would not be traced again
    said = io.StringIO()
    with contextlib.suppress(_AllSeen), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        sys.setprofile(on_call)
        try:
            command()
        finally:
            sys.setprofile(None)
    if missing := wanted.keys() - found.keys():
        raise RuntimeError(
            f"the command ended without the walks {', '.join(sorted(missing))}. It said:\n{said.getvalue()}"
        )
    return {name: found[name] for name in wanted}


def _callers(frame: FrameType) -> list[CodeType]:
    """The package's functions that led to this call, the outermost first."""
    codes, caller = [], frame.f_back
    while caller is not None:
        code, caller = caller.f_code, caller.f_back
        if _file(code) is not None and code.co_name not in ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"):
            codes.append(code)
    return codes[::-1]


def _hops(walk: Walk, codes: Sequence[CodeType]) -> list[Hop]:
    """The calls from a walk's beginning on; none if these calls are not that walk."""
    begin, drafting = _code(walk.begin), any(str(_file(code)).startswith("drafters/") for code in codes)
    if begin not in codes or _code(walk.step) not in codes or drafting != walk.drafting:
        return []
    return [Hop(str(_file(code)), code.co_qualname) for code in codes[codes.index(begin) :]]


def _code(function: Any) -> CodeType:
    """The code of a function; not that of what is wrapped around it while tests run."""
    return _code(function.__wrapped__) if hasattr(function, "__wrapped__") else function.__code__


def _file(code: CodeType) -> str | None:
    """A function's file inside the package; None for a function of others."""
    return code.co_filename.removeprefix(PACKAGE) if code.co_filename.startswith(PACKAGE) else None


def main() -> None:
    target, drafter = bundled_pair()
    for name, hops in {**serving_walks(target, drafter), **training_walks(target)}.items():
        print(f"{name}: {len(hops)} hops in {len({hop.file for hop in hops})} files")
        for hop in hops:
            print(f"  {hop.file}: {hop.function}")


if __name__ == "__main__":
    main()
