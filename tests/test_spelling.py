"""Pages for people and the package's own texts are in US spelling. Names of code may be in another."""

import ast
import io
import re
import tokenize

import pytest

from tests.test_docs import FENCE, PAGES, ROOT

ISE = """
    authoris characteris customis factoris finalis generalis initialis linearis localis materialis maximis
    memoris minimis normalis optimis organis parallelis penalis prioritis quantis randomis realis recognis
    regularis serialis specialis stabilis standardis summaris synchronis tokenis utilis vectoris visualis
"""
OTHERS = """
    analyse artefact behaviour burnt cancelled cancelling catalogue centre colour defence favour fibre fulfil
    grey honour judgement labelled labelling learnt licence litre metre misspelt modelled modelling neighbour
    practise programme spelt towards travelled whilst
"""
BRITISH = re.compile(
    rf"(?<![\w.`/=-])(?:de|un|re)*(?:(?:{'|'.join(ISE.split())})(?:e[drs]?|ers|ing|ations?)"
    rf"|(?:{'|'.join(OTHERS.split())})(?:e?[ds]|ing|ful|able)?)(?![\w=(`]|\.\w)",
    re.I,
)
CODE = re.compile(r"``[^`]*``|`[^`\n]*`|^ +[\w, ]+:", re.M)  # and names of arguments and fields in a docstring
FILES = [
    file
    for top in ("dflash_jax", "infer", "kernels", "train")
    for file in sorted((ROOT / top).rglob("*.py"))
    if not any(part.is_symlink() for part in file.parents)
]


def british(text):
    return BRITISH.findall(CODE.sub("", text))


def texts(source):
    """Comments, docstrings, and other strings of several words."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.value


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages(page):
    assert not british(FENCE.sub("", page.read_text()))


def test_texts_of_the_package():
    assert len(FILES) > 200
    found = [
        (file.relative_to(ROOT).as_posix(), word)
        for file in FILES
        for t in texts(file.read_text())
        for word in british(t)
    ]
    assert not found


@pytest.mark.parametrize("text", ["unquantised weights", "Behaviours", "the optimisers of", "neighbouring", "learnt."])
def test_british_words_are_found(text):
    assert british(text)
    (comment,) = texts(f"x = 1  # {text}\n")
    assert british(comment)
    assert british("".join(texts(f'f"""Its {text} {{x}}"""\n')))


@pytest.mark.parametrize(
    "text", ["`dequantise`", "dflash_jax.quantised", "benchmarks/quantisation.py", "promise", "center"]
)
def test_names_and_other_words_are_not(text):
    assert not british(f"See {text} there.")
