"""The benchmark of several GPUs on gloo ranks: layouts, what is measured, and that wrong outputs get no efficiency."""

import json
import os
import sys
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks import attention, attention_ranks, attention_workloads, clock
from benchmarks.attention_layouts import LAYOUTS, place, predicted_ms, spread_layout
from benchmarks.attention_workloads import WORKLOADS, Workload, workload_forest
from benchmarks.record import ROOT
from benchmarks.report import page
from cp_engine.sharding.exchange import gather
from cp_engine.sharding.layout import imbalance, rank_pairs
from cp_engine.sharding.measure import CHUNK
from tests.ranks import run_ranks

CPU = torch.device("cpu")
TOY = Workload("toy", 8, 4, 16)
TINY = {"toy": (2, 90, [30, 50, 9])}
EXCHANGES = ("gather", "ring", "ulysses")


def drop(*arguments) -> None:
    arguments[-1].wait()


def rank_records(layouts: list[str], dropped: bool = False) -> list[dict]:
    """Every rank's records of the toy workload; ``dropped``: gradients of fetched rows never come home."""
    arguments = attention.arguments_of(["--layouts", *layouts])
    workload_forest.cache_clear()
    with (
        mock.patch.dict(attention_workloads.PROMPTS, TINY),
        mock.patch.dict(WORKLOADS, toy=TOY),
        mock.patch.multiple(attention_ranks, REPEATS=2, WARM_UPS=1),
        mock.patch.object(gather, "add_home", drop if dropped else gather.add_home),
    ):
        records = attention_ranks.run_workload("toy", arguments, CPU, dtype=torch.float32)
    workload_forest.cache_clear()
    dist.barrier()
    return records


def test_every_layout_and_exchange_is_measured_and_right():
    by_rank = run_ranks(2, rank_records, list(LAYOUTS))
    assert by_rank[0] == [{**other, "seconds": mine["seconds"]} for mine, other in zip(*by_rank, strict=True)]
    records = by_rank[0]
    assert {(r["layout"], r["exchange"]) for r in records} == {(a, b) for a in LAYOUTS for b in EXCHANGES}
    for r in records:
        assert (r["gpus"], r["tokens"], r["method"], r["transport"]) == (2, 716, "auto", "collective")
        assert r["max_err"] < 1e-5 and 0 < r["efficiency"], r
        assert r["layer_ms"] == pytest.approx(r["fwd_ms"] + r["bwd_ms"], abs=2e-3)
        assert r["predicted_ms"] > 0 and r["exposed_ms"] < r["layer_ms"]
    moved = {(r["layout"], r["exchange"]): r["moved_mib"] for r in records}
    assert moved["planner", "gather"] == 0, "whole trees on each rank"
    assert moved["contiguous", "gather"] == 0 < moved["spread", "gather"] == moved["spread", "ring"]
    text = page([r | {"commit": "c", "versions": {}, "card": "a card", "command": "x", "date": "d"} for r in records])
    assert "toy" in text and "ulysses" in text


def test_wrong_outputs_get_no_efficiency():
    with_fault = run_ranks(2, rank_records, ["spread"], True)[0]
    without = run_ranks(2, rank_records, ["spread"], False)[0]
    for wrong, fine in zip(with_fault, without, strict=True):
        planted = wrong["exchange"] == "gather"
        assert (wrong["efficiency"] is None) == planted and (wrong["max_err"] > 1e-2) == planted
        assert fine["efficiency"] > 0 and fine["moved_mib"] > 0


def rank_command(results: str, exchanges: str = "gather") -> None:
    """The command as torchrun starts it, on a CPU."""
    argv = f"attention.py --workloads toy --layouts spread --exchanges {exchanges} --results {results}"
    argv += " --record --commit abc"
    argv = [str(ROOT / "benchmarks" / "attention.py"), *argv.split()[1:]]
    workload_forest.cache_clear()
    with (
        mock.patch.dict(attention_workloads.PROMPTS, TINY),
        mock.patch.dict(WORKLOADS, toy=TOY),
        mock.patch.object(attention_ranks, "start", lambda: CPU),
        mock.patch.object(torch.cuda, "get_device_name", lambda: "a card"),
        mock.patch.object(dist, "destroy_process_group", lambda: None),
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"),
        mock.patch.object(sys, "argv", argv),
    ):
        attention.main()
    workload_forest.cache_clear()
    dist.barrier()


def test_the_first_rank_records(tmp_path):
    run_ranks(2, rank_command, str(tmp_path / "rows.jsonl"))
    (row,) = (json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    about = [row[key] for key in ("layout", "exchange", "gpus", "card", "commit")]
    assert about == ["spread", "gather", 2, "a card", "abc"]
    assert row["command"].startswith("torchrun --nproc-per-node 2 -m benchmarks.attention --workloads toy --layouts")
    assert row["max_err"] < 1e-2 and row["efficiency"] > 0 and "torch" in row["versions"]


def stopped_command(results: str) -> None:
    """A time limit ends the run while the second exchange is measured."""
    whole = attention_ranks.measure

    def measure(problem, placement, exchange, *others):
        if exchange == "ring":
            raise SystemExit(143)
        return whole(problem, placement, exchange, *others)

    with mock.patch.object(attention_ranks, "measure", measure), pytest.raises(SystemExit):
        rank_command(results, "gather ring")
    dist.barrier()


def test_what_is_finished_is_recorded_when_a_run_is_stopped(tmp_path):
    run_ranks(2, stopped_command, str(tmp_path / "rows.jsonl"))
    (row,) = (json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    assert (row["exchange"], row["commit"]) == ("gather", "abc") and row["efficiency"] > 0


def test_trunks_are_spread_over_all_ranks():
    for name, trunk in (("art_5k16x100", 1024), ("dualkv_16k28", 1024), ("tau_toy", 100)):
        tiny = {"tau_toy": (3, 200, [150, 20, 300, 40, 10])}
        with mock.patch.dict(attention_workloads.PROMPTS, tiny):
            forest = workload_forest(WORKLOADS[name].tree if name in WORKLOADS else name, 1)
        for world in (2, 3, 4):
            layout = spread_layout(forest, world, trunk)
            owned = np.concatenate([layout.rank_tokens(rank) for rank in range(world)])
            assert np.array_equal(np.sort(owned), np.arange(forest.tokens))
            for segment in np.flatnonzero(forest.segment_length >= trunk):
                part = layout.owner[forest.segment_start[segment] : forest.segment_start[segment + 1]]
                counts = np.bincount(part, minlength=world)
                # Cuts move to the ends of chunks, and by what a rank owns too much or too little of before.
                assert counts.max() - counts.min() <= 4 * CHUNK, (name, segment)
            if name != "tau_toy":  # trunks of two to five chunks
                assert imbalance(layout.rank_token_count) < 1.02
                assert imbalance(rank_pairs(forest, layout)) < 1.02
            begins = layout.piece_start[:-1]
            inside = begins - forest.segment_start[np.searchsorted(forest.segment_start, begins, "right") - 1]
            assert (inside % CHUNK == 0).all(), "chunks of GDN layers are those of one GPU"


def test_ranks_take_turns_in_beginning_trees():
    forest = workload_forest("art_5k16x100", 2)
    for world in (2, 3):
        owner = spread_layout(forest, world).owner[forest.segment_start[:-1][forest.parent < 0]]
        assert owner.tolist() == [tree % world for tree in range(len(owner))]
    workload_forest.cache_clear()


def test_every_layout_covers_the_forest_and_has_predictions():
    workload = WORKLOADS["art_5k16x100"]
    forest = workload_forest(workload.tree, 2)
    times = {}
    for name in LAYOUTS:
        placement = place(name, forest, 2, workload)
        owned = np.concatenate([placement.layout.rank_tokens(rank) for rank in range(2)])
        assert np.array_equal(np.sort(owned), np.arange(81_920))
        times[name] = predicted_ms(placement, workload)
        assert set(times[name]) == set(EXCHANGES)
    assert times["planner"]["gather"] <= times["contiguous"]["gather"]
    with pytest.raises(ValueError, match="layout must be one of planner, spread, contiguous; got 'zigzag'"):
        place("zigzag", forest, 2, workload)


# ms of a layer on two H200s, forward and backward (benchmarks/results.jsonl): commits dc98719, 3ec6fd0 and 8007910. Not
# `ring` where it merges: other kernels computed its parts then.
MEASURED = {
    ("art_5k16x100", "planner"): {"gather": 12.59, "ulysses": 17.75},
    ("art_5k16x100", "spread"): {"gather": 14.37},
    ("chain_128k", "planner"): {"gather": 419.3, "ulysses": 421.3},
    ("dualkv_16k28", "planner"): {"gather": 108.95, "ring": 112.3, "ulysses": 120.7},
}


@pytest.mark.parametrize(("workload", "layout"), MEASURED)
def test_measured_layers_on_two_gpus_are_predicted(workload, layout):
    about = WORKLOADS[workload]
    times = predicted_ms(place(layout, workload_forest(about.tree, 2), 2, about), about)
    for exchange, measured in MEASURED[workload, layout].items():
        assert times[exchange] == pytest.approx(measured, rel=0.15), exchange


def test_laps_follow_each_other():
    ran = []
    laps = clock.laps_ms([lambda: ran.append(1), lambda: ran.append(2)], CPU)
    assert ran == [1, 2] and len(laps) == 2 and min(laps) >= 0


@pytest.mark.parametrize(("ms", "calls"), [(0.01, 2 * clock.MOST), (10.0, 10 + 15), (700.0, 1 + clock.FEWEST)])
def test_short_calls_are_timed_often_and_long_ones_rarely(monkeypatch, ms, calls):
    """Of a GPU, where each call is timed behind milliseconds of idling."""
    made = []
    monkeypatch.setattr(clock, "laps_ms", lambda calls, device: made.append(ms) or [ms])
    assert clock.median_ms(lambda: None, torch.device("cuda")) == ms and len(made) == calls
