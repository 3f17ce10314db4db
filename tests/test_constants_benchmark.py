"""Fitting the planner's constants: known ones come back, and every measurement that a CPU can make runs."""

from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks import attention_ranks, attention_workloads, clock, constants
from benchmarks.attention_problem import make_problem
from benchmarks.attention_workloads import WORKLOADS, Workload, workload_forest
from cp_engine.sharding.cost import H200
from tests.ranks import run_ranks

CPU = torch.device("cpu")
TOY = Workload("toy", 8, 4, 16)
QUICK = {"REPEATS": 2, "FEWEST": 1, "WARM_UPS": 0}


def made_samples(costs) -> list[constants.Sample]:
    counts = np.random.default_rng(0).integers(10_000, 90_000, (6, 2))
    empty = [
        constants.Sample("made", size, step, 32, int(tiles), int(query), 0.0)
        for size, rows in ((128, counts[:4]), (256, counts[4:]))
        for tiles, query in rows
        for step in constants.STEPS
    ]
    return [constants.Sample(*list(vars(s).values())[:-1], ms=s.predicted(costs)) for s in empty]


def test_known_constants_come_back():
    fitted = constants.fit_attention(made_samples(H200))
    for step in constants.STEPS:
        tiles, query = fitted[step]
        assert query == pytest.approx(getattr(H200, f"query_tile_{step}"), rel=1e-3)
        for size in (128, 256):
            assert tiles[size] == pytest.approx(dict(getattr(H200, f"tile_{step}"))[size], rel=1e-3)
    lines = constants.attention_lines(H200, fitted)
    assert len(lines) == 6 and all(abs(line.measured / line.file - 1) < 1e-3 for line in lines)


def test_fitted_constants_predict_better_than_wrong_ones():
    samples = made_samples(H200)
    wrong = constants.with_attention(H200, {step: ({128: 20_000, 256: 20_000}, 0) for step in constants.STEPS})
    right = constants.with_attention(wrong, constants.fit_attention(samples))
    for s in samples:
        assert abs(s.predicted(wrong) / s.ms - 1) > 0.05 > 0.001 > abs(s.predicted(right) / s.ms - 1)
    assert dict(right.tile_forward)[64] == dict(H200.tile_forward)[64], "what was not measured stays"
    (first, *_) = constants.report(samples, wrong, right)
    assert "made, D 128, forward" in first and "(+0.0%)" in first.replace("-0.0%", "+0.0%")


def test_a_line_through_message_sizes():
    sizes = (1, 16, 256)
    assert constants.fit_link(sizes, [(3_320 * mib + 32_000) / 1e6 for mib in sizes]) == (3_320, 32_000)


def test_what_one_gpu_measures_runs(monkeypatch):
    workload_forest.cache_clear()
    monkeypatch.setitem(attention_workloads.PROMPTS, "toy", (1, 60, [20, 30]))
    monkeypatch.setitem(WORKLOADS, "toy", TOY)
    monkeypatch.setattr(constants, "FITTED", {128: ("toy",), 16: ("toy",)})
    for name, value in QUICK.items():
        monkeypatch.setattr(clock, name, value)
    options = {"data": None, "device": CPU, "dtype": torch.float32}
    samples = [s for size in (128, 16) for s in constants.attention_samples(size, **options)]
    assert [(s.size, s.step, s.tiles, s.query_tiles) for s in samples] == [
        (size, step, 1, 1) for size in (128, 16) for step in constants.STEPS
    ]
    assert all(s.ms > 0 for s in samples)
    lines = constants.card_lines(H200, CPU, product=64, copy_mib=1)
    lines.append(constants.group_line(H200, make_problem(TOY, device=CPU, dtype=torch.float32)))
    assert [line.name for line in lines] == ["tera_product", "memory_mib", "group_per_mille"]
    assert "tera_product" in str(lines[0])
    workload_forest.cache_clear()


def rank_links() -> list[constants.Line]:
    with mock.patch.multiple(attention_ranks, REPEATS=2, WARM_UPS=0):
        return constants.link_lines(H200, CPU, ("all_to_all", "send"), (0.25, 1))


def test_what_two_gpus_measure_runs():
    lines = run_ranks(2, rank_links)[0]
    assert [line.name for line in lines] == ["all_to_all_mib", "all_to_all_latency", "send_mib", "send_latency"]
