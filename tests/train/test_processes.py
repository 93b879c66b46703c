"""Training by several processes: the same losses, and a clear end when one of them dies."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from dflash_jax.train.__main__ import main
from dflash_jax.train.checkpoints import CHECKSUMS
from tests import tiny


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("processes")
    tiny.write_target(directory / "target", tiny.target_config())
    rng = np.random.default_rng(0)
    rows = [
        {"id": str(i), "index": i, "prompt_token_ids": [1, 2, 3], "response_token_ids": rng.integers(0, 60, n).tolist()}
        for i, n in enumerate(rng.integers(8, 25, 60))
    ]
    (directory / "answers.jsonl").write_text(
        "".join(json.dumps(row | {"loss_mask": [0] * 3 + [1] * len(row["response_token_ids"])}) + "\n" for row in rows)
    )
    return directory


def command(data, out, steps):
    settings = {
        "target": data / "target",
        "data": data / "answers.jsonl",
        "output": out,
        "mask-token-id": tiny.MASK,
        "block-size": 4,
        "num-layers": 1,
        "length": 32,
        "anchors": 8,
        "batch-size": 4,
        "learning-rate": 1e-3,
        "log-every": 1,
        "save-every": 2,
        "max-steps": steps,
        "epochs": 50,
    }
    return ["fit", *(str(x) for name, value in settings.items() for x in (f"--{name}", value))]


def start(arguments, processes):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": ""}
    run = [sys.executable, "-m", "dflash_jax.train", *arguments, "--mesh", "fsdp=-1"]
    return [
        subprocess.Popen(
            [*run, "--distributed", f"127.0.0.1:{port},{i}/{processes}"],
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for i in range(processes)
    ]


def losses(directory):
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_processes_train_together(data, processes, tmp_path):
    assert main(command(data, tmp_path / "alone", 4)) == 0
    group = start(command(data, tmp_path / "group", 4), processes)
    errors = [process.communicate(timeout=600)[1] for process in group]
    assert [process.returncode for process in group] == [0] * processes, errors[0][-2000:]
    np.testing.assert_allclose(losses(tmp_path / "group"), losses(tmp_path / "alone"), rtol=1e-4)


@pytest.mark.slow
def test_a_group_that_loses_a_member_stops_and_continues(data, tmp_path):
    group = start(command(data, tmp_path / "run", 60), 2)
    whole = tmp_path / "run" / "checkpoints"  # which are written while the run goes on
    while not any(int(file.parent.name) >= 6 for file in whole.glob(f"[0-9]*/{CHECKSUMS}")):
        assert group[0].poll() is None
        time.sleep(0.1)
    group[1].kill()
    group[1].communicate()
    _, error = group[0].communicate(timeout=600)
    assert group[0].returncode not in (0, None)
    assert group[1].wait() == -signal.SIGKILL
    assert error.strip()
    before = losses(tmp_path / "run")
    assert main(command(data, tmp_path / "run", 60)) == 0  # one process goes on where two were
    after = losses(tmp_path / "run")
    assert len(after) == 60
    assert after[:6] == before[:6]
