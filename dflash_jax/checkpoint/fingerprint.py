"""Tells one checkpoint directory from another, wherever it lies, without reading all of it."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from dflash_jax.checkpoint.reader import weight_files

# Small files that decide prompts and answers, taken whole.
CONTENTS = """
    config.json generation_config.json tokenizer.json tokenizer_config.json tokenizer.model vocab.json merges.txt
    special_tokens_map.json added_tokens.json chat_template.jinja chat_template.json
""".split()
PIECES, PIECE = 64, 4096  # of every weight file: how many, of so many bytes


def fingerprint(directory: str | Path) -> str:
    """A hash of a checkpoint's configs, tokenizer and weights; the same for every copy.

    Of each weight file it takes name, size, header and a sample: pieces at even distances, the last bytes among them.
    A small file is read whole; in a large one a change of a few weights may fall between the pieces, another training
    run's weights cannot.

    Raises:
        ValueError: the index of the weight files is no such index.
        OSError: a weight file cannot be read.
    """
    directory, digest = Path(directory), hashlib.sha256()

    def take(*parts: bytes) -> None:
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)

    for name in CONTENTS:
        if (directory / name).is_file():
            take(name.encode(), (directory / name).read_bytes())
    for path in weight_files(directory):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            take(path.name.encode(), size.to_bytes(8, "little"), *_samples(file, size))
    return digest.hexdigest()


def _samples(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The header of a safetensors file, if it is one, then pieces of the rest or, if there are no more, all of it."""
    length = file.read(8)
    header = int.from_bytes(length, "little")
    yield length + file.read(header if header <= size else 0)
    start = file.tell()
    if size - start <= PIECES * PIECE:
        yield file.read()
        return
    for piece in range(PIECES):
        file.seek(start + (size - start - PIECE) * piece // (PIECES - 1))
        yield file.read(PIECE)
