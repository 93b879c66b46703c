"""Jobs on a Ray cluster of this machine, with nodes that go and come."""

import itertools
import json
import re
import subprocess
import sys
from collections import deque
from types import SimpleNamespace

import pytest

from dflash_jax import serve
from dflash_jax.infer.jobs.cluster import DEATHS, RayWorkers, Ready, Remote
from dflash_jax.infer.jobs.lines import Line
from dflash_jax.models import target_config
from tests import jobs, tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:os.fork"),  # the nodes are started by the process of the tests
]
ray = pytest.importorskip("ray")
NODE = {"num_cpus": 2, "resources": {"engine": 1}, "object_store_memory": 100 * 2**20}
USE = ["--ray-resources", '{"engine": 1, "CPU": 1}', "--stats-interval", "1"]


@pytest.fixture
def cluster(monkeypatch):
    """Of a head node that has no room for workers, and no other yet."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_health_check_period_ms", "500")
    monkeypatch.setenv("RAY_health_check_failure_threshold", "3")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 * 2**20})
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ray")
    tiny.write_tokenizer(tiny.write_target(directory / "target", tiny.target_config()))
    tiny.write_drafter(directory / "drafter", tiny.drafter_config())
    return directory


def rows(count, answer=12):
    return [
        {"id": f"r{i}", "prompt_token_ids": [i % 50 + 1, 5, 9], "temperature": 0.3 * (i % 3), "max_new_tokens": answer}
        for i in range(count)
    ]


@pytest.mark.exhaustive
def test_workers_are_killed_and_added(pair, tmp_path, cluster):
    """The records of a job are those of one process, although a worker goes and another one comes."""
    source = jobs.write(tmp_path / "in.jsonl", [*rows(200, 200), {"id": "bad"}, {"id": "n", "prompt": "ab", "n": 2}])
    alone, output, summary = (tmp_path / name for name in ("alone.jsonl", "out.jsonl", "summary.json"))
    assert serve.main(jobs.command(pair, source, alone, "--batch-size", "8")) == 1
    lost, _ = cluster.add_node(**NODE), cluster.add_node(**NODE)
    command = jobs.command(pair, source, output, "--batch-size", "2", "--ray", cluster.address, *USE)
    command = [sys.executable, "-m", "dflash_jax.serve", *command, "--summary", str(summary)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
        assert job.stderr
        seen = []
        for line in job.stderr:
            seen += re.findall(r"workers (\d+/\d+)   slots [1-9]", line)
            if seen and seen[-1] == "2/2" and lost:
                cluster.remove_node(lost, allow_graceful=False)
                lost = None
            if "1/1" in seen and len(cluster.worker_nodes) == 1:
                cluster.add_node(**NODE)
    assert job.returncode == 1
    assert [state for state, _ in itertools.groupby(seen) if state in ("2/2", "1/1")][:3] == ["2/2", "1/1", "2/2"]
    assert jobs.records(output) == jobs.records(alone)
    found = json.loads(summary.read_text())
    assert (found["requests"], found["failed"], found["unfinished"]) == (202, 1, 0)
    settings = [json.loads(path.with_name(path.name + ".settings.json").read_text()) for path in (output, alone)]
    assert settings[0] == settings[1]


def test_a_job_goes_on_with_or_without_ray(pair, tmp_path, cluster, capsys):
    source, output = jobs.write(tmp_path / "in.jsonl", rows(6)), tmp_path / "out.jsonl"
    cluster.add_node(**NODE)
    command = jobs.command(pair, source, output, "--batch-size", "2")
    ray_command = [*command, "--ray", cluster.address, *USE]
    assert serve.main(ray_command) == 0
    expected = jobs.records(output)
    for again in (command, ray_command):
        output.write_text("".join(output.read_text().splitlines(keepends=True)[:3]) + '{"id": "r')
        assert serve.main(again) == 0
        assert "3 lines done, 3 left" in capsys.readouterr().err
        assert jobs.records(output) == expected


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.OutOfMemoryError("no memory"),
        ray.exceptions.NodeDiedError("gone"),
        ray.exceptions.WorkerCrashedError(),
        ray.exceptions.RayTaskError("turn", "a trace", RuntimeError("RESOURCE_EXHAUSTED")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_worker_is_given_up_for_any_failure(error, monkeypatch):
    """Its lines go back to the front, and workers that fail again and again end the job."""
    workers, lost = object.__new__(RayWorkers), []
    a, b, c = (Line(i, name) for i, name in enumerate("abc"))
    remote = Remote(
        actor="actor",
        call="call",
        ready=Ready(2, 1, "float32", 64, target_config(tiny.target_config())),
        lines={"a": a, "b": b},
    )
    asked = lambda calls, **options: (calls, [])
    fake = SimpleNamespace(exceptions=ray.exceptions, wait=asked, kill=lost.append, get=lambda call: raised(error))
    workers._ray, workers._deaths, workers._looked, workers._workers = fake, 0, 0.0, [remote]
    waiting = deque([c])
    assert workers._receive(waiting) == []
    assert (list(waiting), workers._workers, lost) == ([a, b, c], [], ["actor"])
    workers._deaths = DEATHS - 1
    workers._workers = [Remote(actor="actor", call="call", ready=remote.ready)]
    why = "RESOURCE_EXHAUSTED" if isinstance(error, ray.exceptions.RayTaskError) else "the last one so: "
    with pytest.raises(ValueError, match=f"failed without finishing a line.*{why}"):
        workers._receive(waiting)


def raised(error):
    raise error


def test_what_cannot_begin_ends_the_job(pair, tmp_path, cluster, capsys):
    source, output = jobs.write(tmp_path / "in.jsonl", rows(2)), tmp_path / "out.jsonl"
    cluster.add_node(**NODE)
    command = [*jobs.command(pair, source, output), "--ray", cluster.address, *USE]
    assert serve.main([*command, "--block-size", "99"]) == 2
    assert "block_size must lie in 1..8" in capsys.readouterr().err
    assert serve.main([*command, "--processes", "0/2"]) == 2
    assert "--ray and --processes" in capsys.readouterr().err
    assert not output.exists()
