"""`python -m tests.clients DIRECTORY`: do public clients run against `serve --http`, and count what the engine does?

    python -m tests.clients DIRECTORY --install
    python -m tests.clients DIRECTORY

The first command installs, below the directory, what is not in the test extras (about 8 GB): guidellm and aiperf in
environments of their own, and the wheels of vLLM and SGLang, out of which their load generators run (see
`from_wheel`). The second starts a server with the bundled pair and runs every client that is there: the official
`dflash` client, the `openai` package, guidellm, aiperf, `vllm bench serve` and SGLang's `bench_serving`. Then guidellm,
aiperf and vLLM's ask for calls of functions; that server's chat template is one that writes tools.

A line of the table is one client: the requests it completed, and the tokens and the tokens per step that it reports.
Each is compared with what /metrics says of the same run; for the official client's acceptance, a mean over answers,
with its answers. The exit status is 1 if a client failed or reports anything else. A client that is not installed is
named and left out.
"""

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import tyro

from dflash_jax.bundled import bundled_pair
from dflash_jax.data.problems import problems
from tests.clients.figures import Report, counted, differences
from tests.clients.runs import AT_ONCE, CLIENTS, FailedError, MissingError, Setting, environments, flags
from tests.clients.tools import WITH_TOOLS
from tests.fakes.templates import QWEN3_CODER

QUESTIONS = 8


@dataclass(frozen=True)
class Options:
    """Options of `python -m tests.clients`.

    Attributes:
        directory: where the environments and wheels of clients are
        install: install them there, and end
        only: these clients
    """

    directory: tyro.conf.Positional[Path]
    install: bool = False
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = (*CLIENTS, *WITH_TOOLS)


@contextlib.contextmanager
def server(said: Path, target: Path, drafter: Path) -> Iterator[str]:
    """The address of a server in a process of its own.

    Args:
        said: file for its output.
        target, drafter: directories.

    Raises:
        FailedError: it ended before it answered.
    """
    # With one block size the acceptance is the same on every machine; `auto` chooses by how fast steps are.
    options = flags(
        target=target, drafter=drafter, http="127.0.0.1:0", batch_size=AT_ONCE, max_length=1536, block_size=16
    )
    command = [sys.executable, "-m", "dflash_jax.serve", *options]
    with (
        said.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True) as process,
    ):
        try:
            while not (found := re.search(r"answering at (http://\S+)/v1", said.read_text())):
                if process.poll() is not None:
                    raise FailedError(f"the server did not start:\n{said.read_text()}")
                time.sleep(0.2)
            yield found[1]
        finally:
            process.terminate()


def runs(
    work: Path, target: Path, drafter: Path, clients: Mapping[str, Callable[[Setting], Report]], directory: Path
) -> dict[str, str]:
    """Runs clients against a server, prints a line of each, and returns what is wrong, by client."""
    failures: dict[str, str] = {}
    questions = tuple(problem.question for problem in islice(problems(2, held_out=True), QUESTIONS))
    with server(work / f"{target.name}.log", target, drafter) as url:
        setting = Setting(url, target.name, target, questions, directory, work)
        for name, client in clients.items():
            before = counted(url)
            try:
                report = client(setting)
            except MissingError as error:
                print(f"{name:<28}{'':>27}  left out: {error}", flush=True)
                continue
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"
                print(f"{name:<28}{'':>27}  failed, see below", flush=True)
                continue
            if wrong := differences(report, report.requests_each * QUESTIONS, before, counted(url)):
                failures[name] = "; ".join(wrong)
            rate = "-" if report.acceptance is None else f"{report.acceptance:.3f}"
            result = failures.get(name, "as the engine counted")
            print(f"{name:<28}{report.completed:>9}{report.output_tokens:>8}{rate:>10}  {result}", flush=True)
    return failures


def main() -> int:
    options = tyro.cli(Options, prog="python -m tests.clients")
    if options.install:
        for command in environments(options.directory):
            subprocess.run(command, check=True)
        return 0
    if unknown := set(options.only) - CLIENTS.keys() - WITH_TOOLS.keys():
        print(f"expected names of {', '.join([*CLIENTS, *WITH_TOOLS])}, got {', '.join(unknown)}", file=sys.stderr)
        return 2
    target, drafter = bundled_pair()
    failures = {}
    print(f"{'client':<28}{'requests':>9}{'tokens':>8}{'per step':>10}  result", flush=True)
    with tempfile.TemporaryDirectory() as work:
        calling = shutil.copytree(target, Path(work) / "calling")
        (calling / "chat_template.jinja").write_text(QWEN3_CODER.text)
        for of, clients in ((target, CLIENTS), (calling, WITH_TOOLS)):
            chosen = {name: clients[name] for name in options.only if name in clients}
            if chosen:
                failures |= runs(Path(work), of, drafter, chosen, options.directory)
    for name, failure in failures.items():
        print(f"\n{name}: {failure}")
    return int(bool(failures))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FailedError as error:  # the server did not start
        sys.exit(str(error))
