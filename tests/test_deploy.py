"""The files of deploy/: instructions that exist, sources, extras and options that exist."""

import fnmatch
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from dflash_jax import serve
from dflash_jax.parsing import flags

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))
KEY = "DFLASH_API_KEY"  # the variable that sets the server's key
KNOWN = {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"}


def instructions(path):
    """Names and arguments, with lines joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.M).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def sent(source):
    """Whether the builder gets a file or folder of the repository."""
    found = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#") and fnmatch.fnmatch(source, line.removeprefix("!")):
            found = line.startswith("!")
    return found


def test_there_is_one_for_each_kind_of_accelerator():
    assert [path.suffix for path in DOCKERFILES] == [".cuda", ".tpu"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile(path):
    found, extras = instructions(path), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [name for name, _ in found]
    assert set(names) <= KNOWN
    assert names[0] == "FROM"
    given = dict(found)
    assert not given["FROM"].endswith(":latest")
    assert ":" in given["FROM"]
    for name, argument in found:
        if name == "COPY":
            *sources, _ = shlex.split(argument)
            for source in sources:
                assert (ROOT / source).exists(), source
                assert sent(source), f".dockerignore leaves out {source}"
        if name == "RUN" and "pip install" in argument:
            assert "--no-cache-dir" in argument
            (asked,) = re.findall(r"'\.\[([a-z0-9,-]+)\]'", argument)
            assert set(asked.split(",")) <= extras["optional-dependencies"].keys()
            assert {"server", path.suffix[1:]} == set(asked.split(","))
    # Every folder that the package is made of is there when it is installed.
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    copied = {source for name, argument in found if name == "COPY" for source in shlex.split(argument)[:-1]}
    assert set(packages.values()) <= copied
    assert {"pyproject.toml", extras["readme"], *extras["license-files"]} <= copied
    assert names.index("USER") < names.index("ENTRYPOINT")  # not as root
    command = json.loads(given["ENTRYPOINT"])
    assert command[:3] == ["python", "-m", "dflash_jax.serve"]
    options = serve.parse_options(command[3:])
    assert options.http == f"0.0.0.0:{given['EXPOSE']}"
    assert f":{given['EXPOSE']}/health" in given["HEALTHCHECK"]
    for example in re.findall(r"(--[a-z][a-z-]*) \S+/\S+", path.read_text()):
        assert example in flags(serve.ServeOptions) | {"--network"}


def test_compose():
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    server = found["services"]["server"]
    context = (DEPLOY / server["build"]["context"]).resolve()
    assert context == ROOT
    assert (context / server["build"]["dockerfile"]).is_file()
    assert serve.parse_options(["--port", "1", *server["command"]]).models.target
    ports = [port.rpartition(":")[2] for port in server["ports"]]
    assert ports == [dict(instructions(context / server["build"]["dockerfile"]))["EXPOSE"]]
    assert server["init"]  # or the first process ignores signals before the server takes them
    wait = serve.parse_options(["--port", "1"]).server.shutdown_timeout
    assert int(server["stop_grace_period"].removesuffix("s")) > wait
    assert {name.partition(":")[0] for name in server["volumes"]} == found["volumes"].keys()
    (scraped,) = yaml.safe_load(found["configs"]["prometheus"]["content"])["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": [f"server:{ports[0]}"]}]
    assert not any(service.get("image", ":1").endswith(":latest") for service in found["services"].values())


def test_kubernetes():
    objects = {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}
    pod = objects["Deployment"]["spec"]["template"]
    (server,) = pod["spec"]["containers"]
    options = serve.parse_options(["--port", "1", *server["args"]])
    assert options.models.target
    dockerfile = dict(instructions(DEPLOY / "Dockerfile.cuda"))
    assert [str(port["containerPort"]) for port in server["ports"]] == [dockerfile["EXPOSE"]]
    (key,) = server["env"]
    secret, literal = re.search(
        r"create secret generic (\S+) --from-literal=(\S+)=", (DEPLOY / "kubernetes.yaml").read_text()
    ).groups()
    assert key == {"name": KEY, "valueFrom": {"secretKeyRef": {"name": secret, "key": literal}}}
    (at,) = [mount["mountPath"] for mount in server["volumeMounts"]]
    assert at == dockerfile["VOLUME"]
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod["spec"]["volumes"]]
    assert claims == [objects["PersistentVolumeClaim"]["metadata"]["name"]]
    assert pod["spec"]["terminationGracePeriodSeconds"] > options.server.shutdown_timeout
    probes = {name: server[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert probes == {"startup": "/live", "liveness": "/live", "readiness": "/health"}
    served = (ROOT / "infer" / "http" / "server.py").read_text()
    assert all(f'Route("{path}"' in served for path in probes.values())
    (port,) = objects["Service"]["spec"]["ports"]
    assert port["targetPort"] in {one["name"] for one in server["ports"]}
    labels = pod["metadata"]["labels"]
    assert labels == objects["Service"]["spec"]["selector"]
    assert labels == objects["Deployment"]["spec"]["selector"]["matchLabels"]


def test_systemd():
    lines = (line.partition("=") for line in (DEPLOY / "dflash-jax.service").read_text().splitlines())
    unit = {name: value for name, _, value in lines if not name.startswith("#")}
    program, command, *arguments = shlex.split(unit["ExecStart"])
    assert (Path(program).name, command) == ("dflash-jax", "serve")
    options = serve.parse_options(arguments)
    assert options.models.target
    assert int(unit["TimeoutStopSec"]) > options.server.shutdown_timeout
    paths = re.findall(r"=(/\S+)", unit["Environment"])
    assert [Path(path).is_relative_to(Path("/var/cache") / unit["CacheDirectory"]) for path in paths] == [True, True]
    written = re.search(rf"echo {KEY}=\S+ > (\S+)", (DEPLOY / "dflash-jax.service").read_text())
    assert written[1] == unit["EnvironmentFile"]
    assert unit["User"] == "dflash"
