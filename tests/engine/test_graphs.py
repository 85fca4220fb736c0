"""Recorded steps on a stand-in for a GPU: who shares one, what padding may do, and what happens without room."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch

from servekit.engine.batch import Batch
from servekit.engine.device.cpu import CpuDevice
from servekit.engine.device.fake import FakeCuda
from servekit.engine.graphs import MAX_FAILURES, GraphCache, GraphKey, GraphLimits
from servekit.engine.host_batch import HostBatch
from servekit.engine.models.decoder import Decoder
from servekit.engine.runner import ModelRunner
from servekit.engine.step import GraphStats
from tests.engine.attention.capturable import CapturableAttention
from tests.engine.families import make_tiny
from tests.engine.stepping import Stepper, load_decoder, make_cache

_LIMITS = GraphLimits(sequences=(1, 2, 4, 8), tokens=(8, 16, 24))


def host(*mix: tuple[int, int], num_logits: int | None = None, block_size: int = 4) -> HostBatch:
    """Sequences by (tokens of this step, tokens visible), all in the blocks from 1 on."""
    query_lens, context_lens = (np.array(values, dtype=np.int64) for values in zip(*mix, strict=True))
    ends = np.cumsum(query_lens)
    tables = np.ones((len(mix), max(-(-context // block_size) for _, context in mix)), dtype=np.int64)
    positions = np.concatenate([np.arange(context - query, context) for query, context in mix])
    return HostBatch(
        input_ids=np.arange(ends[-1]) + 10,
        positions=positions,
        logits_idx=ends[:num_logits] - 1,
        slot_mapping=positions + block_size,
        block_tables=tables,
        query_lens=query_lens,
        context_lens=context_lens,
        block_size=block_size,
        token_sources=np.full(ends[-1], -1, dtype=np.int64),
    )


def cache(device: FakeCuda, memory: int = 2**30, **limits: Any) -> GraphCache:
    settings: dict[str, Any] = {"max_num_seqs": 7, "max_context_len": 64, "max_blocks": 16, "limits": _LIMITS}
    return GraphCache(device, memory=memory, **{**settings, **limits})


def sums(batch: Batch) -> torch.Tensor:
    """For each logits row: its token, its position, and the sum of its table's first two blocks."""
    assert batch.block_tables is not None
    assert batch.slot_mapping is not None
    rows = batch.logits_idx
    picked = torch.stack((batch.input_ids[rows], batch.positions[rows], batch.slot_mapping[rows]), dim=1)
    return picked.float()


def play(graphs: GraphCache, device: FakeCuda, batch: HostBatch) -> tuple[GraphKey | None, list[list[float]]]:
    """One step; the rows of the real sequences."""
    key = graphs.key("text", batch)
    num = len(batch.logits_idx)
    if key is None:
        return None, sums(Batch.of(batch, device.upload(batch.arrays()))).tolist()
    padded = batch.padded(key.num_tokens, key.num_seqs)
    rows = graphs.run(key, padded, device.upload(padded.arrays()), sums)
    assert rows.shape[0] == key.num_seqs
    return key, rows[:num].tolist()


@pytest.mark.parametrize(
    ("mix", "expected"),
    [
        ([(1, 5)], GraphKey("decode", 1, 1)),
        ([(1, 5)] * 2, GraphKey("decode", 2, 2)),
        ([(1, 5)] * 3, GraphKey("decode", 4, 4)),
        ([(1, 1)] * 4, GraphKey("decode", 4, 4)),
        ([(1, 5)] * 8, GraphKey("decode", 8, 8)),
        ([(1, 5)] * 9, None),
        ([(8, 8)], GraphKey("mixed", 8, 2)),
        ([(9, 9)], GraphKey("mixed", 16, 2)),
        ([(1, 5), (7, 20)], GraphKey("mixed", 8, 4)),
        ([(1, 5)] * 3 + [(7, 20)], GraphKey("mixed", 16, 8)),
        ([(24, 24)], GraphKey("mixed", 24, 2)),
        ([(25, 25)], None),
        ([(2, 2)] * 8, None),
    ],
)
def test_sizes_at_their_edges(mix: list[tuple[int, int]], expected: GraphKey | None) -> None:
    assert cache(FakeCuda()).key("text", host(*mix)) == expected


def test_a_prefill_that_is_not_finished_is_no_decoding_step() -> None:
    assert cache(FakeCuda()).key("text", host((1, 5), (1, 9), num_logits=1)) == GraphKey("mixed", 8, 4)


def test_a_batch_without_a_cache_is_an_embedding() -> None:
    assert cache(FakeCuda()).key("embed", host((1, 1), (1, 1))) == GraphKey("embed", 8, 4)


def test_first_eager_then_recorded_then_replayed() -> None:
    device = FakeCuda()
    graphs = cache(device)
    for length in range(4, 9):
        batch = host((1, length), (1, length + 1), (1, 3))
        key, rows = play(graphs, device, batch)
        assert key == GraphKey("decode", 4, 4)
        assert rows == sums(Batch.of(batch, CpuDevice().upload(batch.arrays()))).tolist()
    assert device.record.events == ["capture 0", "replay 0", "replay 0", "replay 0", "replay 0"]
    stats = graphs.stats()
    assert (stats.warm_ups, stats.captures, stats.replays, stats.graphs, stats.eager) == (1, 1, 4, 1, 0)
    assert stats.bytes == 2**20


def test_sizes_take_turns_and_do_not_mix() -> None:
    device = FakeCuda()
    graphs = cache(device)
    batches = [host((1, 9)), host((1, 7), (1, 8)), host((5, 9), (1, 2)), host((1, 30), (1, 31), (1, 32), (1, 3))]
    for _ in range(3):
        for batch in batches:
            assert play(graphs, device, batch)[1] == sums(Batch.of(batch, CpuDevice().upload(batch.arrays()))).tolist()
    assert graphs.stats().captures == 4
    assert graphs.stats().replays == 8


def test_the_least_recently_used_is_given_up_and_recorded_again_without_another_warm_up() -> None:
    device = FakeCuda(graph_memory=100)
    graphs = cache(device, memory=250)
    one, two, three = host((1, 5)), host((1, 5), (1, 6)), host((4, 4))
    for batch in (one, one, two, two, one, three, three):
        play(graphs, device, batch)
    stats = graphs.stats()
    assert (stats.captures, stats.evictions, stats.graphs, stats.bytes) == (3, 1, 2, 200)
    play(graphs, device, one)
    assert graphs.stats().captures == 3, "the one used last was kept"
    play(graphs, device, two)
    stats = graphs.stats()
    assert (stats.captures, stats.evictions, stats.warm_ups) == (4, 2, 3)


def test_what_cannot_be_recorded_runs_eagerly_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeCuda()
    device.fail_captures = ["operation not permitted"]
    graphs = cache(device)
    batch = host((1, 5))
    expected = sums(Batch.of(batch, CpuDevice().upload(batch.arrays()))).tolist()
    answers = [play(graphs, device, batch) for _ in range(4)]
    assert [rows for _, rows in answers] == [expected] * 4
    assert [key is None for key, _ in answers] == [False, False, True, True]
    assert graphs.failure == "operation not permitted"
    assert "operation not permitted" in caplog.text
    stats = graphs.stats()
    assert (stats.failures, stats.captures, stats.warm_ups, stats.eager) == (1, 0, 2, 2)
    # Another size is not given up for it.
    for _ in range(2):
        play(graphs, device, host((1, 5), (1, 6)))
    assert graphs.stats().captures == 1


def test_a_device_that_records_nothing_is_not_asked_for_ever() -> None:
    device = FakeCuda()
    device.fail_captures = ["no"] * MAX_FAILURES
    graphs = cache(device)
    for size in (1, 2, 4):
        for _ in range(2):
            play(graphs, device, host(*[(1, 5)] * size))
    assert graphs.stats().failures == MAX_FAILURES
    assert graphs.key("text", host(*[(1, 5)] * 8)) is None


def test_a_graph_larger_than_the_budget_is_not_kept() -> None:
    device = FakeCuda(graph_memory=100)
    graphs = cache(device, memory=99)
    for _ in range(3):
        play(graphs, device, host((1, 5)))
    assert graphs.stats() == GraphStats(captures=1, capture_seconds=graphs.stats().capture_seconds, warm_ups=2,
                                        eager=1, failures=1)  # fmt: skip
    assert graphs.failure is not None
    assert "99" in graphs.failure


class TestPadding:
    """Dummy sequences behind the real ones."""

    def test_decoding(self) -> None:
        padded = host((1, 9), (1, 4)).padded(4, 4)
        assert padded.input_ids.tolist() == [10, 11, 0, 0]
        assert padded.positions.tolist() == [8, 3, 0, 0]
        assert padded.query_lens.tolist() == [1, 1, 1, 1]
        assert padded.context_lens.tolist() == [9, 4, 1, 1]
        assert padded.logits_idx.tolist() == [0, 1, 0, 0]
        assert padded.slot_mapping is not None
        assert padded.block_tables is not None
        assert padded.token_sources is not None
        assert padded.slot_mapping.tolist() == [12, 7, 0, 0]
        assert padded.block_tables.tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0], [0, 0, 0]]
        assert padded.token_sources.tolist() == [-1] * 4

    def test_the_last_dummy_takes_the_tokens_that_are_left(self) -> None:
        padded = host((3, 9)).padded(16, 4)
        assert padded.query_lens.tolist() == [3, 1, 1, 11]
        assert padded.context_lens.tolist() == [9, 1, 1, 11]

    def test_a_dummy_longer_than_every_sequence_has_a_table_for_it(self) -> None:
        padded = host((3, 3)).padded(16, 2)
        assert padded.context_lens.tolist() == [3, 13]
        assert padded.block_tables is not None
        assert padded.block_tables.tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]

    def test_dummies_may_have_no_tokens(self) -> None:
        padded = host((7, 9)).padded(8, 4)
        assert padded.query_lens.tolist() == [7, 1, 0, 0]

    def test_a_batch_that_fits_is_left_alone(self) -> None:
        batch = host((1, 3), (1, 4))
        assert [a.tolist() for a in batch.padded(2, 2).arrays()] == [a.tolist() for a in batch.arrays()]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    model = make_tiny("gemma2", tmp_path_factory.mktemp("graphs") / "model", num_hidden_layers=2)
    return load_decoder(model.directory, backend=CapturableAttention())


def stepper_with_graphs(decoder: Decoder, memory: int = 2**30) -> tuple[Stepper, FakeCuda]:
    device = FakeCuda()
    stepper = Stepper(decoder, device, num_blocks=40, max_num_seqs=7, max_num_batched_tokens=30, max_model_len=90)
    limits = stepper.scheduler.config
    stepper.runner = ModelRunner(
        decoder,
        make_cache(decoder.spec, limits.num_blocks, limits.block_size),
        device,
        max_num_seqs=limits.max_num_seqs,
        graphs=GraphCache(device, memory=memory, max_num_seqs=7, max_context_len=90, max_blocks=12, limits=_LIMITS),
    )
    return stepper, device


def fill(stepper: Stepper, lengths: Seq[int]) -> dict[str, list[int]]:
    for index, length in enumerate(lengths):
        prompt = [(7 * place + index) % 131 for place in range(length)]
        stepper.add(
            f"r{index}",
            prompt,
            max_tokens=12 + index,
            ignore_eos=True,
            **({"seed": 3, "temperature": 0.7} if index % 3 == 2 else {}),
        )
    return stepper.drain()


def test_a_model_with_graphs_answers_as_without(decoder: Decoder) -> None:
    """Through every bucket edge: seven sequences that end one after the other, whose prompts come in chunks."""
    lengths = [3, 40, 17, 8, 30, 1, 12]
    stepper, device = stepper_with_graphs(decoder)
    answers = fill(stepper, lengths)
    plain = Stepper(decoder, num_blocks=40, max_num_seqs=7, max_num_batched_tokens=30, max_model_len=90)
    assert answers == fill(plain, lengths)
    stats = stepper.runner.graph_stats()
    assert stats.replays > 10
    assert stats.captures >= 2
    assert stats.failures == 0
    assert device.record.replays == stats.replays


def test_warming_up_records_every_decoding_size_and_changes_no_answer(decoder: Decoder) -> None:
    stepper, _ = stepper_with_graphs(decoder)
    assert isinstance(stepper.runner, ModelRunner)
    stepper.runner.warm_up()
    stats = stepper.runner.graph_stats()
    assert (stats.captures, stats.warm_ups, stats.replays) == (4, 4, 4)
    answers = fill(stepper, [5, 9, 2])
    plain = Stepper(decoder, num_blocks=40, max_num_seqs=7, max_num_batched_tokens=30, max_model_len=90)
    assert answers == fill(plain, [5, 9, 2])


def test_dummies_leave_the_null_block_finite_and_every_other_block_alone(decoder: Decoder) -> None:
    device = FakeCuda()
    kv = make_cache(decoder.spec, 6, 8)
    for layer in range(decoder.spec.num_layers):
        kv.layer(layer)[1:].fill_(3.0)
    graphs = GraphCache(device, memory=2**30, max_num_seqs=7, max_context_len=40, max_blocks=5, limits=_LIMITS)
    runner = ModelRunner(decoder, kv, device, max_num_seqs=7, graphs=graphs)
    runner.warm_up()
    for layer in range(decoder.spec.num_layers):
        assert (kv.layer(layer)[1:] == 3.0).all()
        assert torch.isfinite(kv.layer(layer)[0]).all()


def test_a_step_behind_another_is_replayed_with_the_tokens_of_the_device(decoder: Decoder) -> None:
    stepper, device = stepper_with_graphs(decoder)
    fill(stepper, [4])
    events = [event for event in device.record.events if event.startswith(("wait", "replay"))]
    # Steps 0 and 1 are prefill and warm-up; the replay of step 2 is launched before step 1 is read.
    assert events[:4] == ["wait 0", "replay 0", "wait 1", "replay 0"]
