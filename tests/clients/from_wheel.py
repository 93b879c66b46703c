"""Runs the load generator of a serving engine out of its wheel, without the engine and what it depends on.

    pip download --no-deps --only-binary :all: sglang==0.5.23 vllm==0.33.0 -d WHEELS
    python from_wheel.py WHEELS/sglang-0.5.23-*.whl --backend sglang-oai-chat --base-url http://127.0.0.1:8000 ...
    python from_wheel.py WHEELS/vllm-0.33.0-*.whl --backend openai-chat --base-url http://127.0.0.1:8000 ...

Everything after the wheel goes to the load generator. It needs its own small packages, which `tests.clients` names.

Importing either engine imports torch and CUDA libraries, which the load generators, plain HTTP clients, never use. So
the `__init__` of a package on the way is not run, and modules of the engine that the load generator imports, but does
not need for text, are replaced by placeholders. All code of the load generators is the wheel's own.
"""

import importlib.abc
import importlib.machinery
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


class LoadGenerator(NamedTuple):
    """Which part of a wheel runs.

    Attributes:
        entry: module with the command.
        bare: packages whose `__init__` is left out.
        placeholders: modules that are left out, with the values that are needed of them. Any other name that is
            imported from them is an empty class.
    """

    entry: str
    bare: tuple[str, ...]
    placeholders: dict[str, dict[str, Any]]


def tokenizer_of(directory: str, **options: Any) -> Any:
    """What vLLM's `get_tokenizer` returns for a tokenizer of transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def url_of(given: str | None, host: str | None, port: int | None) -> str:
    """What SGLang's `resolve_base_url` returns."""
    return given or f"http://{host}:{port}"


def logger_of(name: str) -> Any:
    """What vLLM's `init_logger` returns."""
    import logging

    return logging.getLogger(name)


LOAD_GENERATORS = {
    "sglang": LoadGenerator(
        "sglang.benchmark.serving",
        ("sglang", "sglang.srt", "sglang.srt.disaggregation", "sglang.srt.utils"),
        {
            "sglang.srt.disaggregation.utils": {"FAKE_BOOTSTRAP_HOST": ""},  # of an option that is not used
            "sglang.srt.utils.network": {"resolve_base_url": url_of},
            "datasets": {},  # of the hub
        },
    ),
    "vllm": LoadGenerator(
        "vllm.benchmarks.serve",
        ("vllm", "vllm.lora", "vllm.multimodal", "vllm.transformers_utils", "vllm.utils"),
        {
            "vllm.logger": {"init_logger": logger_of},
            "vllm.tokenizers": {"get_tokenizer": tokenizer_of},
            "vllm.utils.gc_utils": {"freeze_gc_heap": lambda: None},
            "vllm.utils.network_utils": {"join_host_port": lambda host, port: f"{host}:{port}"},
            "vllm.utils.mistral": {"is_mistral_tokenizer": lambda tokenizer: False},
            "vllm.inputs": {},
            "vllm.lora.request": {},
            "vllm.lora.utils": {},
            "vllm.multimodal.audio": {},
            "vllm.multimodal.image": {},
            "vllm.multimodal.utils": {},
            "vllm.transformers_utils.repo_utils": {},
            "datasets": {},
        },
    ),
}


class Replaced(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds bare packages and placeholders before anything else does."""

    def __init__(self, root: str, which: LoadGenerator):
        self._root, self._which = root, which

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname in self._which.placeholders:
            return importlib.machinery.ModuleSpec(fullname, self)
        if fullname in self._which.bare:
            spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
            spec.submodule_search_locations = [f"{self._root}/{fullname.replace('.', '/')}"]
            return spec
        return None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in self._which.placeholders:
            module.__dict__.update(self._which.placeholders[module.__name__])

            def missing(name: str) -> type:
                if name.startswith("__"):
                    raise AttributeError(name)
                return type(name, (), {})

            module.__dict__["__getattr__"] = missing


def main(argv: Sequence[str]) -> None:
    """Runs the load generator of the wheel `argv[0]`, or of the directory it was unpacked into, on the other arguments.

    Raises:
        ValueError: the file is no wheel of a known engine.
    """
    wheel = Path(argv[0]).resolve()
    name = wheel.name.partition("-")[0]
    if name not in LOAD_GENERATORS or not wheel.exists():
        raise ValueError(f"expected a wheel of one of {', '.join(LOAD_GENERATORS)}, got {argv[0]}")
    which = LOAD_GENERATORS[name]
    sys.path.insert(0, str(wheel))
    sys.meta_path.insert(0, Replaced(str(wheel), which))
    sys.argv = [which.entry, *argv[1:]]
    entry = importlib.import_module(which.entry)
    if name == "sglang":
        entry.cli_main()
        return
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # pyright: ignore[reportMissingImports]

    parser = FlexibleArgumentParser()
    entry.add_cli_args(parser)
    print(json.dumps(entry.main(parser.parse_args()), default=str))


if __name__ == "__main__":
    main(sys.argv[1:])
