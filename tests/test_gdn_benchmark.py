"""The GDN benchmark: one GPU's methods in Triton's interpreter, the two-rank layer on gloo ranks.

The interpreter has to be switched on before Triton is imported, so its cases run in a process of their own.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.gdn_workloads import sequences
from benchmarks.report import page
from cp_engine.layers import gdn_crossing
from cp_engine.layers.gdn_tables import GdnHeads
from cp_engine.sharding.cost import PRESETS
from cp_engine.sharding.gdn_layout import place_layers
from tests.gdn_oracle import forest_of_segments
from tests.in_interpreter import pass_in_the_interpreter
from tests.ranks import run_ranks


def test_in_the_interpreter():
    pytest.importorskip("fla")
    pass_in_the_interpreter("tests/interpreted_gdn_benchmark.py")


def toy(gpus: int):
    """As many trees as GPUs."""
    trees = [[(-1, 70), (3 * tree, 20), (3 * tree, 9)] for tree in range(gpus)]
    return forest_of_segments([segment for tree in trees for segment in tree])


def without_states(exits, tables, transport):
    return torch.zeros_like(HAND_ON(exits, tables, transport))


HAND_ON = gdn_crossing.hand_on


def rank_records(layouts: list[str], forgets: bool = False) -> list[dict]:
    from benchmarks import attention_ranks, gdn_ranks, gdn_stages

    module = gdn_ranks.layer_module(GdnHeads(2, 4, 16, 16), 32, torch.device("cpu"), torch.float32)
    with (
        mock.patch.multiple(attention_ranks, REPEATS=1, WARM_UPS=1),
        mock.patch.object(gdn_stages, "REPEATS", 2),
        mock.patch.object(gdn_crossing, "hand_on", without_states if forgets else HAND_ON),
    ):
        records = gdn_ranks.run_workload("toy", toy, module, gdn_ranks.arguments_of(["--layouts", *layouts]))
    dist.barrier()
    return records


def test_a_layer_over_two_ranks_beside_one():
    pytest.importorskip("triton")
    by_rank = run_ranks(2, rank_records, ["planner", "spread"])
    records = by_rank[0]
    keys = ("layout", "exchange")
    assert [[r[k] for k in keys] for r in records] == [[r[k] for k in keys] for r in by_rank[1]]
    assert {(r["layout"], r["exchange"]) for r in records} == {
        (a, b) for a in ("planner", "spread") for b in ("affine", "ulysses")
    }
    for r in records:
        assert r["right"] and r["max_err"] <= 1e-5 and r["ratio"] > 0 and (r["gpus"], r["tokens"]) == (2, 198), r
        assert set(r["errors"]) >= {"out", "dhidden", "A_log", "conv1d.weight", "in_proj_qkv.weight"}
        assert (r["predicted_layer_ms"] is None) == (r["predicted_path"] is None) == (r["exchange"] == "ulysses")
        for direction, path in (r["predicted_path"] or {}).items():
            whole = r["predicted_forward_ms" if direction == "fwd" else "predicted_backward_ms"]
            assert sum(path.values()) == pytest.approx(whole, abs=1e-3) and min(path.values()) >= 0
            assert path["again"] == 0 and (path["wait"] > 0) == (r["layout"] == "spread"), "states are handed on"
    by_case = {(r["layout"], r["exchange"]): r for r in records}
    assert by_case["planner", "affine"]["predicted_exposed_ms"] == 0, "whole trees on each rank"
    assert {"hand_on", "fetch_rows"} <= set(by_case["spread", "affine"]["stages"]["fwd"])
    assert {"hand_back", "rows_home"} <= set(by_case["spread", "affine"]["stages"]["bwd"])
    assert {"rows_to_heads", "heads_to_rows"} <= set(by_case["spread", "ulysses"]["stages"]["fwd"])
    text = page([r | {"commit": "c", "versions": {}, "card": "a card", "command": "x", "date": "d"} for r in records])
    assert "| toy | 2 | 198 | spread | affine |" in text


def test_forgotten_states_get_no_ratio():
    pytest.importorskip("triton")
    for r in run_ranks(2, rank_records, ["spread"], True)[0]:
        forgets = r["exchange"] == "affine"
        assert r["right"] != forgets and (r["ratio"] is None) == forgets and (r["max_err"] > 1e-2) == forgets, r


def moves_of_a_chain() -> list[dict]:
    from benchmarks import attention_ranks, gdn_relay

    forest = sequences([4096])
    shape = PRESETS["qwen3-next-80b-a3b"]
    found = []
    with mock.patch.multiple(attention_ranks, REPEATS=1, WARM_UPS=1):
        for choice in ("own", "same"):
            placed = place_layers(forest, 2, model=shape, gdn_layout=choice)
            found.append(gdn_relay.measure_moves(placed, replace(shape, hidden=8), torch.device("cpu"), torch.bfloat16))
    dist.barrier()
    return found


def test_moves_around_a_run_come_back_bit_for_bit():
    for own, same in run_ranks(2, moves_of_a_chain):
        assert own["relay_right"] and own["relay_ms"] > 0 and own["predicted_relay_ms"] > 0
        assert set(same) == set(own) and not any(same.values())
