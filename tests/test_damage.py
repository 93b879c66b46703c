"""Every reader of a file, given damaged ones. Other seeds: `python -m tests.soak --only damage --seed 7`."""

import random

from tests import damage


def test_whatever_a_file_holds_is_read_or_refused_in_one_line_that_names_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    counts = damage.run(tmp_path, random.Random(0), 2)
    assert sum(count["refused"] for count in counts.values()) > 50
    assert counts["checkpoints"]["read"]  # the one before the damaged one is whole
