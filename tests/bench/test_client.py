"""The load generator on real sockets, against a server that does as it is told."""

import asyncio
import json
from collections.abc import Callable
from itertools import count

import pytest

from servekit.bench.client import Client, Planned
from servekit.bench.connection import Address
from servekit.bench.load import Trace, closed_loop, open_loop, run_on_loop
from servekit.bench.measure import measure
from servekit.bench.result import Record
from servekit.bench.stats import percentile
from servekit.bench.times import chunk_gaps, time_to_first_token
from servekit.errors import ConfigError
from tests.bench.fake_server import DONE, ROLE, Answer, FakeServer, Script, Seen, Step, chat_event, event, plain_chat

PATH = "/v1/chat/completions"


def planned(times: list[float]) -> list[Planned]:
    return [
        Planned(index, PATH, json.dumps({"number": index}).encode(), scheduled_s=at) for index, at in enumerate(times)
    ]


def open_run(script: Script, times: list[float], **settings: int) -> tuple[Trace, list[Seen]]:
    """The trace of an open loop, and what the server saw."""
    with FakeServer(script) as server:

        async def main() -> Trace:
            client = Client(Address.parse(server.url), timeout=20.0)
            try:
                return await open_loop(client, planned(times), **settings)  # type: ignore[arg-type]
            finally:
                client.close()

        return run_on_loop(main()), server.seen


def one(answer: Answer, *, timeout: float = 20.0) -> Record:
    """The record of one request."""
    with FakeServer(lambda number, seen: answer) as server:

        async def main() -> Record:
            client = Client(Address.parse(server.url), timeout=timeout)
            try:
                return await client.send(planned([0.0])[0], 0.0)
            finally:
                client.close()

        return run_on_loop(main())


def test_every_request_is_sent_once_in_the_order_of_the_schedule() -> None:
    trace, seen = open_run(lambda number, seen: plain_chat(3), [0.005 * n for n in range(40)])

    assert [record.index for record in trace.records] == list(range(40))
    assert all(record.ok for record in trace.records)
    assert [request.body["number"] for request in seen] == list(range(40))
    assert all((record.sent_s or 0.0) >= record.scheduled_s for record in trace.records)


def test_what_is_reported_is_what_the_server_did() -> None:
    """On a quiet machine the difference is a fraction of a millisecond; here only that nothing is misattributed."""
    answer = Answer(
        [
            Step(0.0, ROLE),
            Step(0.05, b": ping\n\n"),
            *(Step(0.15 + 0.05 * n, chat_event(f" {n}")) for n in range(4)),
            Step(0.4, chat_event(finish_reason="length") + DONE),
        ]
    )
    trace, seen = open_run(lambda number, seen: answer, [0.02 * n for n in range(20)])
    truth = {request.body["number"]: request for request in seen}
    ttft_errors, gap_errors = [], []
    for record in trace.records:
        request = truth[record.index]
        ttft = time_to_first_token(record, from_send=True)
        assert ttft is not None
        assert ttft >= 0.149
        ttft_errors.append(ttft - (request.written[2] - request.received))
        gaps = [later - earlier for earlier, later in zip(request.written[2:6], request.written[3:6], strict=False)]
        gap_errors += [abs(said - was) for said, was in zip(chunk_gaps(record), gaps, strict=True)]

    assert percentile(ttft_errors, 0.5) < 0.03
    assert percentile(gap_errors, 0.5) < 0.02


def test_a_frozen_server_does_not_hold_up_the_schedule() -> None:
    """Coordinated omission: what should have been sent during a stall has waited, whoever held it back."""

    def freeze(number: int, seen: Seen) -> Answer:
        return Answer([Step(1.0 if number == 10 else 0.0, b": thinking\n\n"), *plain_chat(1).steps])

    times = [0.01 * n for n in range(100)]
    capped, _ = open_run(freeze, times, max_in_flight=1)
    free, _ = open_run(freeze, times)

    def p90(trace: Trace, *, from_send: bool) -> float:
        summary = measure(trace.records).latency
        found = summary.ttft_from_send_s if from_send else summary.ttft_s
        assert found is not None
        return found.p90

    assert p90(capped, from_send=False) > 0.5
    assert p90(capped, from_send=True) < 0.5
    assert p90(free, from_send=False) < 0.5
    assert sum((record.sent_s or 0.0) - record.scheduled_s > 0.005 for record in capped.records) > 50


def test_a_closed_loop_never_has_more_open_than_clients() -> None:
    with FakeServer(lambda number, seen: plain_chat(2, ttft=0.005)) as server:

        async def main() -> Trace:
            client = Client(Address.parse(server.url))
            plan = (Planned(index, PATH, b"{}") for index in count())
            try:
                return await closed_loop(client, plan, concurrency=3, requests=20, duration=None)
            finally:
                client.close()

        trace = run_on_loop(main())

    assert len(trace.records) == 20
    assert all(record.scheduled_s <= (record.sent_s or 0.0) < record.scheduled_s + 0.001 for record in trace.records)
    spans = [(record.sent_s or 0.0, record.end_s or 0.0) for record in trace.records]
    assert max(sum(begin <= at < end for begin, end in spans) for at, _ in spans) <= 3
    assert trace.reused_connections == 17


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (Answer([Step(0.0, b'{"error": {"message": "full"}}')], 429, "application/json"), 429, "429: full"),
        (Answer([Step(0.0, b"<html>oops</html>")], 502, "text/html"), 502, "502: <html>oops</html>"),
        (Answer([Step(0.0, chat_event("a")), Step(0.0, event({"error": "dead"}) + DONE)]), 200, "dead"),
        (Answer([Step(0.0, chat_event("a"))]), 200, "the stream ended without"),
        (Answer([Step(0.0, chat_event("a"))], cut=True), 200, "closed in the middle of the answer"),
        (Answer([Step(0.0, b"not json")], 200, "application/json"), 200, "the answer is not JSON"),
        (Answer([Step(0.0, b"data: {broken\n\n")]), 200, "an event is not JSON"),
    ],
)
def test_failures_say_what_happened(answer: Answer, status: int, said: str) -> None:
    record = one(answer)

    assert not record.ok
    assert record.status == status
    assert said in (record.error or "")


def test_a_request_without_an_end_times_out() -> None:
    record = one(Answer([Step(0.0, chat_event("a")), Step(5.0, DONE)]), timeout=0.2)

    assert record.error == "no end after 0.2 s"
    assert record.status == 200


def test_nobody_listens() -> None:
    with FakeServer(lambda number, seen: plain_chat(1)) as server:
        address = Address.parse(server.url)

    record = run_on_loop(Client(address).send(planned([0.0])[0], 0.0))

    assert not record.ok
    assert record.status is None


def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    """A server that closes after every answer without saying so."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"choices": [], "usage": {"prompt_tokens": 1}}'
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body))
        writer.write(body)
        await writer.drain()
        # The next request finds the connection half closed.
        await reader.read(1)
        writer.transport.abort()
        await writer.wait_closed()
        ended.release()

    ended = asyncio.Semaphore(0)

    async def main() -> list[Record]:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Client(Address.parse(f"http://127.0.0.1:{port}"))
        try:
            return [await client.send(Planned(index, "/", b""), 0.0) for index in range(3)]
        finally:
            client.close()
            for _ in range(3):
                await ended.acquire()
            server.close()

    assert [record.error for record in asyncio.run(main())] == [None, None, None]


def test_the_key_is_sent_and_kept_out_of_the_record() -> None:
    with FakeServer(lambda number, seen: plain_chat(1)) as server:

        async def main() -> Record:
            client = Client(Address.parse(server.url + "/v1"), api_key="secret")
            try:
                return await client.send(planned([0.0])[0], 0.0)
            finally:
                client.close()

        record = run_on_loop(main())
        assert server.seen[0].headers["authorization"] == "Bearer secret"
        assert server.seen[0].path == PATH

    assert "secret" not in repr(record)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://host/v1/", "http://host:80"),
        ("https://host/base/v1", "https://host:443/base"),
        ("http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_addresses(url: str, expected: str) -> None:
    assert Address.parse(url).url == expected


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:x", "http://host:99999"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        Address.parse(url)


def test_a_failing_sender_ends_the_run() -> None:
    """A mistake of ours must not hang a run that waits for its last answer."""

    class Broken(Client):
        async def send(self, planned: Planned, zero: float) -> Record:
            raise RuntimeError("a mistake")

    make: Callable[[], Client] = lambda: Broken(Address.parse("http://127.0.0.1:9"))  # noqa: E731
    with pytest.raises(RuntimeError, match="a mistake"):
        run_on_loop(open_loop(make(), planned([0.0, 0.01])))
