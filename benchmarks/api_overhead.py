"""What the HTTP side costs: tokens a second of streams over HTTP, against Engine.generate called directly.

Both are measured in turns with one engine in one process; the HTTP client has a process of its own, as clients do.

    python -m benchmarks.api_overhead [MODEL] [--slots 16] [--tokens 64] [--rounds 3] [--threads 1]
"""

import argparse
import asyncio
import json
import socket
import statistics
import sys
import time

import uvicorn
import uvloop

from servekit.config import EngineConfig
from servekit.engine.core.request import Request, SamplingParams
from servekit.engine.engine import Engine
from servekit.engine.load import load_engine, open_model
from servekit.server.app import create_app
from servekit.server.state import ServerState
from servekit.store.resolve import ensure_model

_CLIENT = """
import asyncio, json, sys, time
port, slots, tokens = map(int, sys.argv[1:])
async def one(i):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = {"prompt": [i + 5, *range(20, 50)], "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\\r\\nhost: localhost\\r\\ncontent-type: application/json\\r\\n"
    writer.write(f"{head}connection: close\\r\\ncontent-length: {len(raw)}\\r\\n\\r\\n".encode() + raw)
    answer = await reader.read()
    assert b"[DONE]" in answer, answer
    writer.close()
async def main():
    began = time.perf_counter()
    await asyncio.gather(*(one(i) for i in range(slots)))
    print(time.perf_counter() - began)
asyncio.run(main())
"""


async def direct(engine: Engine, slots: int, tokens: int, round_: int) -> float:
    """Seconds for all answers from the facade, text included."""

    async def one(i: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        prompt = (i + 5, *range(20, 50))
        request = Request(f"direct-{round_}-{i}", prompt, sampling, time.monotonic(), continues_text=True)
        async with engine.generate(request) as chunks:
            async for _ in chunks:
                pass

    began = time.perf_counter()
    await asyncio.gather(*(one(i) for i in range(slots)))
    return time.perf_counter() - began


async def over_http(port: int, slots: int, tokens: int) -> float:
    """Seconds for the same answers as streams, by the client's clock."""
    arguments = ("-c", _CLIENT, str(port), str(slots), str(tokens))
    client = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    out, _ = await client.communicate()
    assert client.returncode == 0
    return float(out)


async def run(model: str, slots: int, tokens: int, rounds: int, threads: int) -> dict[str, float]:
    """Measure; the first round of each only warms up."""
    loaded = load_engine(open_model(ensure_model(model)), EngineConfig(model=model, parallel=slots, threads=threads))
    engine = loaded.engine
    engine.start()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        app = create_app(ServerState(engine.model_name, engine))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        times: dict[str, list[float]] = {"direct": [], "http": []}
        for round_ in range(rounds + 1):
            seconds = await direct(engine, slots, tokens, round_), await over_http(port, slots, tokens)
            if round_:
                times["direct"].append(seconds[0])
                times["http"].append(seconds[1])
        server.should_exit = True
        await serving
    await engine.close()
    rate = {name: slots * tokens / statistics.median(seconds) for name, seconds in times.items()}
    return {
        "direct_tokens_per_second": round(rate["direct"], 1),
        "http_tokens_per_second": round(rate["http"], 1),
        "ratio": round(rate["http"] / rate["direct"], 3),
    }


def main() -> None:
    """Parse, measure, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    for name, value in (("slots", 16), ("tokens", 64), ("rounds", 3), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    print(json.dumps(uvloop.run(run(**vars(parser.parse_args())))))


if __name__ == "__main__":
    main()
