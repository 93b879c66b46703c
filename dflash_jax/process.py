"""How a command's own process starts as fast as it can."""

import contextlib
import gc
import sys
from collections.abc import Iterator

_answers_only = False


def answer_only() -> None:
    """Says that this process is a command's own, and only answers. It then searches less for garbage among objects that
    stay, and does not import torch (see `torch_hidden`): together a third of a start."""
    global _answers_only
    _answers_only = True
    gc.set_threshold(50_000, 20, 20)


@contextlib.contextmanager
def torch_hidden() -> Iterator[None]:
    """Within, torch looks as if it were not installed, in a process that only answers. transformers remembers that; it
    imports torch for every tokenizer, and needs it for none."""
    hide = _answers_only and "torch" not in sys.modules
    modules = vars(sys)["modules"]
    if hide:
        modules["torch"] = None
    try:
        yield
    finally:
        if hide:
            modules.pop("torch", None)
