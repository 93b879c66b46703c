"""Clients of every kind at one server: hostile ones, slow ones, large ones, many, and those that hang up."""

import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.jobs import models_of
from tests.soak.fuzz import FIELDS, JUNK
from tests.soak.runs import LONGEST, Bench, Run, expect

KEY = "key"
CLIENT_TIMEOUT = 5.0


class Served:
    """A server in a process of its own."""

    def __init__(self, run: Run, port: int):
        self.run, self.port = run, port

    async def send(self, data: bytes, most: int | None = None) -> bytes:
        """Sends bytes and returns what comes back, to its end or until there are `most` bytes; then hangs up."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        found = b""
        try:
            writer.write(data)
            await writer.drain()
            while more := await asyncio.wait_for(reader.read(2**16), LONGEST):
                found += more
                if most is not None and len(found) >= most:
                    break
        except (ConnectionError, BrokenPipeError):
            pass  # it may hang up before it has read all
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        return found

    async def post(self, body: Any, most: int | None = None) -> tuple[int, bytes]:
        """Status and body of an answer to a request for a completion."""
        url = "/v1/chat/completions" if isinstance(body, dict) and "messages" in body else "/v1/completions"
        data = await self.send(request(url, json.dumps(body).encode()), most)
        head, _, rest = data.partition(b"\r\n\r\n")
        return int(head.split()[1]) if head else 0, rest

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[list[float]]:
        """Seconds that /health takes meanwhile."""
        seconds: list[float] = []

        async def watch() -> None:
            while True:
                begin = time.perf_counter()
                found = await self.send(request("/health", method="GET"))
                expect(found.startswith(b"HTTP/1.1 200"), f"/health: {found[:200]!r}")
                seconds.append(time.perf_counter() - begin)
                await asyncio.sleep(0.02)

        watcher = asyncio.create_task(watch())
        try:
            yield seconds
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    async def idle(self) -> None:
        """Waits until no slot is busy and no request waits."""
        deadline = time.monotonic() + LONGEST
        while time.monotonic() < deadline:
            if not await self.present():
                return
            await asyncio.sleep(0.1)
        expect(False, "slots stay busy")

    async def present(self) -> int:
        """Requests in a slot, or waiting for one."""
        metrics = (await self.send(request("/metrics", method="GET"))).decode()
        found = re.findall(r"^dflash_(?:slots_busy|requests_waiting) (\S+)$", metrics, re.M)
        return int(sum(map(float, found)))

    @property
    def mebibytes(self) -> float:
        """Resident memory."""
        pages = int(Path(f"/proc/{self.run.number}/statm").read_text().split()[1])
        return pages * 4096 / 2**20


def request(url: str, body: bytes = b"", *, method: str = "POST", key: str = KEY) -> bytes:
    """A whole request, after whose answer the server hangs up."""
    head = f"{method} {url} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@contextlib.contextmanager
def serving(bench: Bench) -> Iterator[Served]:
    """A server of the bench's pair with 8 slots."""
    limits = ["--batch-size", "8", "--max-length", "512", "--client-timeout", str(CLIENT_TIMEOUT)]
    limits += ["--shutdown-timeout", str(LONGEST)]
    command = [sys.executable, "-m", "dflash_jax.serve", *models_of(bench.pair), "--http", "127.0.0.1:0"]
    run = Run([*command, "--api-key", KEY, *limits], bench.environment, bench.directory / "server.log")
    try:
        found = lambda: re.search(r"answering at http://127.0.0.1:(\d+)/", run.said)
        run.until(lambda: found() is not None)
        expect((match := found()) is not None, f"no server: {run.said[-2000:]}")
        yield Served(run, int(match[1]))
        expect("Traceback" not in run.said, f"a traceback in the log: {run.said[-3000:]}")
    finally:
        run.signal(signal.SIGKILL)


def attack(bench: Bench, rng: random.Random, scale: float) -> dict[str, object]:
    """At scale 1: 1,500 hostile requests, 1,500 slow clients, 100 that read nothing, 240 large bodies, and a load of
    2,000 requests, some of which hang up."""
    count = lambda most: max(2, round(most * scale))

    async def all_of_it(server: Served) -> dict[str, object]:
        return {
            "hostile": await _hostile(server, rng, count(1500)),
            "slow": await _slow(server, count(1500)),
            "unread": await _unread(server, count(100)),
            "large": await _large(server, count(80)),
            "load": await _load(server, rng, _counted(count(2000))),
            "ended": await _ended(server),
        }

    with serving(bench) as server:
        return asyncio.run(all_of_it(server))


def load_for(bench: Bench, rng: random.Random, seconds: float) -> dict[str, object]:
    """A load of requests, some of which hang up, for so long."""
    end = time.monotonic() + seconds

    async def load(server: Served) -> dict[str, object]:
        figures = await _load(server, rng, lambda: time.monotonic() < end)
        return figures | {"ended": await _ended(server)}

    with serving(bench) as server:
        return asyncio.run(load(server))


def _counted(count: int) -> Callable[[], bool]:
    left = iter(range(count))
    return lambda: next(left, None) is not None


async def _hostile(server: Served, rng: random.Random, count: int) -> dict[str, object]:
    """No request, however malformed, is answered with 5xx. Those that were hung up on are counted as closed."""
    statuses: Counter[str] = Counter()
    for _ in range(count):
        data = _malformed(rng)
        found = await server.send(data)
        status = found.split()[1].decode() if found else "closed"
        expect(not status.startswith("5"), f"{status} for {data[:500]!r}")
        statuses[status] += 1
    return dict(sorted(statuses.items()))


def _malformed(rng: random.Random) -> bytes:
    body: dict[str, Any] = {"prompt": "abc", "max_tokens": 4}
    if rng.random() < 0.5:
        body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}
    for _ in range(rng.randint(0, 3)):
        body[rng.choice(FIELDS)] = rng.choice(JUNK)
    data = json.dumps(body).encode()
    if rng.random() < 0.3:
        at = rng.randrange(len(data))
        data = data[:at] + rng.choice([b"", b"\xff", b"[" * 3000, b'"', b"\0", b"9" * 400]) + data[at + 1 :]
    url = rng.choice(["/v1/completions", "/v1/chat/completions"] * 5 + ["/", "/v1/models", "/%00", "/../etc", "*"])
    method = rng.choice(["POST"] * 9 + ["GET", "PUT", "DELETE", "OPTIONS", "BREW", "POST\t"])
    whole = request(url, data, method=method, key=KEY if rng.random() < 0.9 else rng.choice(["", "x", "\u00e9"]))
    kind = rng.random()
    if kind < 0.1:  # a damaged head
        at = rng.randrange(whole.index(b"\r\n\r\n"))
        return whole[:at] + bytes([rng.randrange(256)]) + whole[at + 1 :]
    if kind < 0.15:  # a second length
        return whole.replace(b"\r\n", b"\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n", 1)
    if kind < 0.2:  # too large
        return request(url, b" " * (2**20 + 1), method=method)
    return whole


async def _slow(server: Served, count: int) -> dict[str, object]:
    """Clients that send half a request are hung up on; meanwhile others are answered."""
    whole = request("/v1/completions", b'{"prompt": "abc"}')
    halves = [whole[: whole.index(b"\r\n\r\n")], whole[:-5]]
    begin = time.monotonic()
    async with server.watched() as health:
        waiting = [asyncio.create_task(server.send(halves[i % 2])) for i in range(count)]
        await asyncio.sleep(1)
        status, _ = await server.post({"prompt": "abc", "max_tokens": 4})
        expect(status == 200, f"status {status} beside slow clients")
        await asyncio.gather(*waiting)
    seconds = time.monotonic() - begin
    expect(seconds < LONGEST / 2, f"slow clients were still there after {seconds:.0f} s")
    return {"clients": count, "all gone after, s": round(seconds, 1)} | _health(health)


async def _unread(server: Served, count: int) -> dict[str, object]:
    """Clients that ask for large answers and read nothing are hung up on; meanwhile others are answered."""
    begin = time.monotonic()
    async with server.watched() as health:
        clients = [await _ask_and_read_nothing(server, streamed=i % 2 == 0) for i in range(count)]
        status, _ = await server.post({"prompt": "abc", "max_tokens": 4})
        expect(status == 200, f"status {status} beside clients that read nothing")
        await server.idle()
        await asyncio.sleep(2 * CLIENT_TIMEOUT)
        most = max([await _rest(client) for client in clients])
    return {"clients": count, "bytes at most": most, "seconds": round(time.monotonic() - begin, 1)} | _health(health)


async def _ask_and_read_nothing(server: Served, *, streamed: bool) -> socket.socket:
    """A client that has asked for some 500,000 bytes, and for whom the kernels keep few of them."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    client.setblocking(False)
    body = {"prompt": "abc", "max_tokens": 256, "n": 4, "logprobs": 20, "temperature": 1.0, "stream": streamed}
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", server.port))
    await loop.sock_sendall(client, request("/v1/completions", json.dumps(body).encode()))
    return client


async def _rest(client: socket.socket) -> int:
    """Bytes that come until the server has hung up; raises SoakError if it has not."""
    count, loop = 0, asyncio.get_running_loop()
    with client, contextlib.suppress(ConnectionResetError):
        try:
            while found := await asyncio.wait_for(loop.sock_recv(client, 2**16), CLIENT_TIMEOUT):
                count += len(found)
                expect(count < 250_000, "more came of an answer than a client had taken in time")
        except TimeoutError:
            expect(False, "a client that reads nothing was not hung up on")
    return count


async def _large(server: Served, count: int) -> dict[str, object]:
    """Bodies near the limit hold up nobody."""
    chat = {"messages": [{"role": "user", "content": "a" * 1_000_000}]}
    stops = {"prompt": "abc", "n": 16, "stop": ["ab" for _ in range(140_000)]}
    words = {"prompt": "ab c" * 250_000}
    async with server.watched() as health:
        statuses = await asyncio.gather(*(server.post(body) for body in (chat, words, stops) * count))
        status, _ = await server.post({"prompt": "abc", "max_tokens": 20})
    expect(status == 200, f"status {status} beside large requests")
    expect({status for status, _ in statuses} == {400}, f"statuses {Counter(s for s, _ in statuses)}")
    expect(max(health) < 2, f"/health took {max(health):.1f} s")
    return {"requests": len(statuses)} | _health(health)


async def _load(server: Served, rng: random.Random, going: Callable[[], bool]) -> dict[str, Any]:
    """64 clients at a time; one in four hangs up. The same request is answered alike every time."""
    prompts = ["abc", "hello there", "a b c d e f", "z" * 200]
    expected: dict[tuple[str, int], str] = {}
    counts: Counter[str] = Counter()
    before = server.mebibytes

    async def client() -> None:
        while going():
            prompt, seed = rng.choice(prompts), rng.randrange(20)
            body = {"prompt": prompt, "seed": seed, "temperature": 1.0, "max_tokens": 30, "stream": rng.random() < 0.5}
            if rng.random() < 0.25:
                await server.post(body, most=rng.choice([0, 1, 700]))
                counts["hung up"] += 1
                continue
            status, answer = await server.post(body)
            expect(status == 200, f"status {status}: {answer[:300]!r}")
            text = _streamed(answer) if body["stream"] else json.loads(answer)["choices"][0]["text"]
            expect(expected.setdefault((prompt, seed), text) == text, f"{prompt!r}, seed {seed}: another answer")
            counts["answered"] += 1

    begin = time.monotonic()
    async with server.watched() as health:
        await _together(client() for _ in range(64))
    seconds = time.monotonic() - begin
    await server.idle()
    memory = {"MiB before": round(before), "MiB after": round(server.mebibytes)}
    return dict(counts) | {"differing": 0, "seconds": round(seconds, 1)} | memory | _health(health)


def _streamed(answer: bytes) -> str:
    """The text of a stream of events in chunked coding."""
    body, rest = b"", answer
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size, 16)
        body, rest = body + rest[:count], rest[count + 2 :]
    events = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    expect(events[-1] == "[DONE]", f"a stream ended with {events[-1]!r}")
    chunks = [json.loads(event) for event in events[:-1]]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


async def _ended(server: Served) -> dict[str, object]:
    """Asked to end with 16 requests in progress, a body half sent and an answer not read, a server answers the 16 and
    ends."""
    body = {"prompt": "abc", "max_tokens": 300, "temperature": 1.0}
    half = asyncio.create_task(server.send(request("/v1/completions", b'{"prompt": "abc"}')[:-5]))
    asked = [asyncio.create_task(server.post(body)) for _ in range(16)]
    unread = await _ask_and_read_nothing(server, streamed=False)
    while await server.present() + sum(task.done() for task in asked) < 16:
        await asyncio.sleep(0.01)
    begin = time.monotonic()
    server.run.signal(signal.SIGTERM)
    statuses = [status for status, _ in await asyncio.gather(*asked)]
    answered = time.monotonic() - begin
    status, _ = await asyncio.to_thread(server.run.wait)
    seconds = time.monotonic() - begin
    expect(statuses == [200] * 16, f"statuses {statuses} while it ended")
    expect(status in (0, -signal.SIGTERM), f"it ended with {status}")
    expect(seconds < answered + LONGEST / 2, f"it ended after {seconds:.1f} s, answered after {answered:.1f} s")
    await half
    unread.close()
    return {"in progress": 16, "answered": 16, "seconds": round(seconds, 1)}


async def _together(clients: Iterator[Coroutine[Any, Any, None]] | Any) -> None:
    """Runs them all; the first failure ends them."""
    tasks: list[Awaitable[None]] = [asyncio.create_task(client) for client in clients]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()  # type: ignore[attr-defined]


def _health(seconds: list[float]) -> dict[str, object]:
    p99, most = np.percentile(seconds, 99), max(seconds)
    return {"/health p99, ms": round(1000 * float(p99), 1), "max": round(1000 * most, 1)}
