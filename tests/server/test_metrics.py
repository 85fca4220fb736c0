"""`/metrics` and `/slots`: what a scraper and a curious person see."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from servekit.server.app import create_app
from tests.server.client import http_client, state_with
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

USER_A = [{"role": "user", "content": "abc"}]


async def _scrape(num_requests: int) -> dict[str, float]:
    """Every sample of a server that has answered `num_requests` streams, by name and distinguishing labels."""
    async with http_client(state_with(FakeEngine())) as client:
        for _ in range(num_requests):
            answer = await client.post("/v1/chat/completions", json={"messages": USER_A, "stream": True})
            assert answer.status_code == 200
        await client.get("/metrics")
        answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            extra = [value for name, value in sample.labels.items() if name != "model_name"]
            samples[":".join([sample.name.removeprefix("servekit:"), *extra])] = sample.value
    return samples


async def test_gauges_and_totals_are_the_engines_and_do_not_grow_by_being_read() -> None:
    samples = await _scrape(0)
    assert (samples["num_requests_running"], samples["num_requests_waiting"]) == (1, 0)
    assert (samples["kv_blocks_live"], samples["kv_blocks_cached"], samples["kv_blocks_free"]) == (3, 2, 5)
    assert samples["kv_cache_usage_perc"] == 0.3
    assert (samples["prefix_cache_queries_total"], samples["prefix_cache_hits_total"]) == (40, 16)
    assert (samples["engine_steps_total"], samples["engine_model_seconds_total"]) == (7, 0.5)
    assert samples["time_to_first_token_seconds_count"] == 0


async def test_a_request_is_counted_once_with_its_tokens_and_intervals() -> None:
    samples = await _scrape(3)
    assert samples["request_success_total:stop"] == 3
    assert (samples["prompt_tokens_total"], samples["generation_tokens_total"]) == (9, 27)
    assert samples["time_to_first_token_seconds_count"] == 3
    # Two chunks of 2 and 6 tokens: six intervals follow the first token.
    assert samples["inter_token_latency_seconds_count"] == 18
    assert samples["e2e_request_latency_seconds_count"] == 3
    for interval, seconds in (("queue", 0.001), ("prefill", 0.02), ("decode", 0.04)):
        assert samples[f"request_{interval}_time_seconds_sum"] == pytest.approx(3 * seconds)


async def test_slots_are_rows() -> None:
    async with http_client(state_with(FakeEngine())) as client:
        (row,) = (await client.get("/slots")).json()
    assert (row["slot"], row["state"], row["blocks"], row["decode_ms"]) == (0, "decode", 1, 40.0)


def test_two_servers_in_one_process_do_not_share_a_registry() -> None:
    create_app(state_with(FakeEngine()))
    create_app(state_with(FakeEngine()))
