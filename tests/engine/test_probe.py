"""The measurement behind `--dtype auto`: what it computes, and what it leaves as it was."""

import torch

from servekit.engine.probe import DTypeProbe, probe_dtypes


def test_ratios_are_those_of_the_best_runs_and_the_thread_count_is_put_back() -> None:
    before = torch.get_num_threads()
    probe = probe_dtypes(torch.device("cpu"))
    assert isinstance(probe, DTypeProbe)
    assert 0 < probe.linear_ratio < 1000
    assert 0 < probe.attention_ratio < 1000
    assert torch.get_num_threads() == before
