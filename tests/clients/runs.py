"""One run of each client against a server, and what the client says of it.

Every run asks the same questions, for at most `LENGTH` tokens each. Load generators ignore the end of text, as they
do by default; the official client and the OpenAI package do not.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

from tests.clients.figures import Report

LENGTH = 48  # tokens of an answer
AT_ONCE = 2  # requests in progress
LONGEST = 300  # seconds of a run
PACKAGES = "aiohttp jinja2 msgspec numpy orjson pandas pillow pybase64 pyyaml regex requests tqdm transformers>=5"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class MissingError(Exception):
    """A client that is not installed."""


class FailedError(Exception):
    """A run that did not end as it should."""


@dataclass(frozen=True)
class Setting:
    """What runs get.

    Attributes:
        url: of the server, without a path.
        model: name of the model there.
        target: directory with its tokenizer.
        questions: that are asked.
        clients: directory of environments and wheels; see `environments`.
        work: directory for files of a run.
    """

    url: str
    model: str
    target: Path
    questions: tuple[str, ...]
    clients: Path
    work: Path

    def data(self, name: str, rows: Sequence[object]) -> str:
        """A JSONL file."""
        path = self.work / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    def command(self, environment: str, name: str) -> str:
        """The path of a command of one of the environments.

        Raises:
            MissingError: it is not there.
        """
        path = self.clients / environment / "bin" / name
        if not path.exists():
            raise MissingError(f"no {environment} environment in {self.clients}")
        return str(path)

    def wheel(self, name: str) -> str:
        """The path of a wheel.

        Raises:
            MissingError: it is not there.
        """
        for path in (self.clients / "wheels").glob(f"{name}-*.whl"):
            return str(path)
        raise MissingError(f"no wheel of {name} in {self.clients / 'wheels'}")


def run(command: Sequence[str], **variables: str) -> str:
    """The output of a command.

    Raises:
        FailedError: it ended with an error, or not in time.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LONGEST,
            env=inherited | variables,
        )
    except subprocess.TimeoutExpired as error:
        raise FailedError(f"it had not ended after {LONGEST} seconds") from error
    if done.returncode:
        raise FailedError(f"status {done.returncode}:\n{done.stdout[-1500:]}")
    return done.stdout


def flags(**options: object) -> list[str]:
    """Options of a command line; True is an option without a value."""
    listed = []
    for name, value in options.items():
        listed += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return listed


def dflash(setting: Setting) -> Report:
    """`dflash benchmark openai`, the official client. It takes its questions from the hub only, so the function that
    loads them is replaced, and it has warm-up requests that its report leaves out."""
    import dflash.benchmark
    from dflash.cli import main

    answers = []
    send = dflash.benchmark.send_openai

    def listening(base_url: str, messages: list[dict], **options: object) -> dict:
        answers.append(answer := send(base_url, messages, **options))  # pyright: ignore[reportArgumentType]
        return answer

    def questions(name: str) -> list[dict]:
        return [{"turns": [question]} for question in setting.questions]

    said = io.StringIO()
    options = flags(
        model=setting.model,
        base_url=setting.url,
        dataset="problems",
        num_prompts=len(setting.questions),
        concurrency=AT_ONCE,
        max_new_tokens=LENGTH,
    )
    with (
        patch("dflash.benchmark.load_and_process_dataset", questions),
        patch("dflash.benchmark.send_openai", listening),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        main(["benchmark", "openai", *options])
    figure = lambda name: re.search(rf"^{name}: +([\d.]+)", said.getvalue(), re.M)
    output, acceptance, steps = map(figure, ("Output tokens", "Accept length", "Spec verify ct"))
    if not output or not acceptance or not steps:
        raise FailedError(f"it reports no tokens, accept length or steps:\n{said.getvalue()}")
    counted = answers[AT_ONCE:]
    taken = sum(answer["speculation"]["steps"] for answer in counted)
    if int(steps[1]) != taken:
        raise FailedError(f"it reports {steps[1]} steps, the answers had {taken}")
    return Report(
        len(counted),
        None,
        int(output[1]),
        float(acceptance[1]),
        warm_up=sum(answer["usage"]["completion_tokens"] for answer in answers[:AT_ONCE]),
        # It prints three digits of the mean over answers.
        expected_acceptance=round(fmean(answer["speculation"]["tau"] for answer in counted), 3),
    )


def openai(setting: Setting) -> Report:
    """The OpenAI package: whole answers and streams of both endpoints."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{setting.url}/v1", api_key="none")
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    usages, steps, committed = [], 0, 0
    for i, question in enumerate(setting.questions):
        options = {"model": setting.model, "temperature": 0.0, "extra_body": {"return_meta_info": True}}
        if i % 2:
            options |= {"prompt": question, "max_tokens": LENGTH}
            create = client.completions.create
        else:
            options |= {"messages": [{"role": "user", "content": question}], "max_completion_tokens": LENGTH}
            create = client.chat.completions.create
        if i % 4 < 2:
            answer = create(**options)
            usages.append(answer.usage)
            steps += answer.meta_info["spec_verify_ct"]
            committed += round(answer.meta_info["spec_accept_length"] * answer.meta_info["spec_verify_ct"])
        else:
            chunks = list(create(**options, **streaming))
            usages.append(chunks[-1].usage)
            speculation = next(chunk.speculation for chunk in chunks if getattr(chunk, "speculation", None))
            steps += speculation["steps"]
            committed += sum(speculation["acceptance_lengths"])
    prompt, output = (sum(getattr(usage, name) for usage in usages) for name in ("prompt_tokens", "completion_tokens"))
    return Report(len(usages), prompt, output, committed / steps)


def guidellm(setting: Setting, endpoint: str, columns: dict[str, object] | None = None, **fields: object) -> Report:
    """`guidellm run`. A column that says how many tokens an answer has makes it send `ignore_eos`.

    With a column of tools it asks for a call, then sends what it returned, and asks for an answer without one. `fields`
    are further ones of requests.
    """
    rows = [{"prompt": question, "output_tokens_count": LENGTH} | (columns or {}) for question in setting.questions]
    turns = 2 if columns else 1
    report = setting.work / "guidellm.json"
    options = flags(
        disable_console_interactive=True,
        backend=json.dumps(
            {"kind": "openai_http", "target": setting.url, "request_format": endpoint, "extras": {"body": fields}}
        ),
        profile=f"kind=concurrent,streams={AT_ONCE}",
        constraint=f"kind=max_requests,count={turns * len(rows)}",
        tokenizer=f"kind=huggingface_auto,model={setting.target}",
        data=f"kind=json_file,path={setting.data('guidellm.jsonl', rows)}",
        output=f"kind=json,path={report}",
    )
    run([setting.command("guidellm", "guidellm"), "run", *options], HF_HUB_OFFLINE="1")
    requests = json.loads(report.read_text())["benchmarks"][0]["requests"]
    if requests["errored"] or requests["incomplete"]:
        raise FailedError(f"requests failed: {str(requests['errored'] or requests['incomplete'])[:1500]}")
    done = requests["successful"]
    total = lambda name: sum(request[name] or 0 for request in done)
    steps = [(request.get("response_metrics") or {}).get("speculative_decoding") or {} for request in done]
    taken = sum(each.get("num_spec_steps", 0) for each in steps)
    accepted = sum(each.get("num_accepted_draft_tokens", 0) for each in steps)
    return Report(
        len(done),
        total("prompt_tokens"),
        total("output_tokens"),
        1 + accepted / taken if taken else None,
        total("cached_tokens"),
        requests_each=turns,
    )


def aiperf(setting: Setting, endpoint: str, **fields: object) -> Report:
    """`aiperf profile`, counting what the server says; with further fields of the request."""
    rows = [{"text": question, "output_length": LENGTH} for question in setting.questions]
    out = setting.work / "aiperf"
    options = flags(
        model=setting.model,
        tokenizer=setting.target,
        url=setting.url,
        endpoint_type="chat" if endpoint == CHAT else "completions",
        streaming=True,
        use_server_token_count=True,
        extra_inputs=json.dumps(fields or {"ignore_eos": True}),
        input_file=setting.data("aiperf.jsonl", rows),
        custom_dataset_type="single_turn",
        request_count=len(rows),
        concurrency=AT_ONCE,
        output_artifact_dir=out,
        ui="none",
    )
    run([setting.command("aiperf", "aiperf"), "profile", *options])
    report = json.loads((out / "profile_export_aiperf.json").read_text())
    if report["error_summary"]:
        raise FailedError(f"requests failed: {str(report['error_summary'])[:1500]}")
    total = lambda name: int(report[name]["avg"]) if name in report else 0
    steps = total("total_spec_decode_steps")
    return Report(
        total("request_count"),
        total("total_usage_prompt_tokens"),
        total("total_usage_completion_tokens"),
        1 + total("total_accepted_draft_tokens") / steps if steps else None,
        total("total_usage_prompt_cache_read_tokens"),
    )


def from_wheel(setting: Setting, engine: str, **options: object) -> str:
    """The output of an engine's load generator."""
    python, script = setting.command("loads", "python"), Path(__file__).with_name("from_wheel.py")
    common = flags(base_url=setting.url, num_prompts=len(setting.questions), max_concurrency=AT_ONCE, disable_tqdm=True)
    return run([python, str(script), setting.wheel(engine), *common, *flags(**options)], HF_HUB_OFFLINE="1")


def vllm(setting: Setting, endpoint: str, **fields: object) -> Report:
    """`vllm bench serve`, which takes the acceptance from /metrics."""
    rows = [{"prompt": question} for question in setting.questions]
    said = from_wheel(
        setting,
        "vllm",
        backend="openai-chat" if endpoint == CHAT else "openai",
        endpoint=endpoint,
        model=setting.target,
        served_model_name=setting.model,
        dataset_name="custom",
        dataset_path=setting.data("vllm.jsonl", rows),
        skip_chat_template=True,  # the server applies it
        custom_output_len=LENGTH,
        **({"extra_body": json.dumps(fields)} if fields else {"ignore_eos": True}),
        temperature=0,
    )
    report = json.loads(said.splitlines()[-1])
    if report["failed"]:
        raise FailedError(f"{report['failed']} requests failed:\n{said[:1500]}")
    return Report(
        report["completed"],
        report["total_input_tokens"],
        report["total_output_tokens"],
        report.get("spec_decode_acceptance_length"),
    )


def sglang(setting: Setting, endpoint: str) -> Report:
    """SGLang's `bench_serving`, which takes the acceptance from /server_info, over all requests since the start.

    It reports the length it asked for, unless the server says how many tokens there are. In completions it reads that
    from chunks with text only, and misses the tokens without text that follow an ignored end of text. So it is told in
    chat completions only.
    """
    if endpoint == CHAT:
        rows = [{"messages": [{"role": "user", "content": question}]} for question in setting.questions]
        data, extra = "openai", {"stream_options": {"include_usage": True}}
    else:
        turns = lambda question: [{"role": "user", "content": question}, {"role": "assistant", "content": "unused"}]
        rows = [{"conversations": turns(question)} for question in setting.questions]
        data, extra = "custom", {}
    report = setting.work / "sglang.jsonl.report"
    report.unlink(missing_ok=True)
    from_wheel(
        setting,
        "sglang",
        backend="sglang-oai-chat" if endpoint == CHAT else "sglang-oai",
        model=setting.model,
        tokenizer=setting.target,
        dataset_name=data,
        dataset_path=setting.data("sglang.jsonl", rows),
        sharegpt_output_len=LENGTH,
        warmup_requests=0,
        extra_request_body=json.dumps(extra),
        output_file=report,
        output_details=True,
    )
    said = json.loads(report.read_text())
    if any(said["errors"]):
        raise FailedError(f"requests failed: {''.join(said['errors'])[:1500]}")
    return Report(said["completed"], None, said["total_output_tokens"], said["accept_length"], since_start=True)


CLIENTS = {
    "dflash": dflash,
    "openai": openai,
    "guidellm, chat": lambda setting: guidellm(setting, CHAT),
    "guidellm, text": lambda setting: guidellm(setting, TEXT),
    "aiperf, chat": lambda setting: aiperf(setting, CHAT),
    "aiperf, text": lambda setting: aiperf(setting, TEXT),
    "vllm bench serve, chat": lambda setting: vllm(setting, CHAT),
    "vllm bench serve, text": lambda setting: vllm(setting, TEXT),
    "sglang bench_serving, chat": lambda setting: sglang(setting, CHAT),
    "sglang bench_serving, text": lambda setting: sglang(setting, TEXT),
}


def environments(clients: Path) -> list[list[str]]:
    """Commands that install the clients which are not in the test extras, in the versions that the page names.

    `guidellm` and `aiperf` get an environment each, with all they depend on. The load generators of vLLM and SGLang run
    out of the engines' wheels, with the packages of `loads`.
    """
    made = {
        "guidellm": ["guidellm==0.8.1"],
        "aiperf": ["aiperf==0.13.0"],
        "loads": PACKAGES.split(),
    }
    commands = []
    for name, packages in made.items():
        commands.append([sys.executable, "-m", "venv", str(clients / name)])
        commands.append([str(clients / name / "bin" / "pip"), "install", "-q", *packages])
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    return [*commands, [*download, "vllm==0.33.0", "sglang==0.5.23", "-d", str(clients / "wheels")]]
