"""Predicted times: equal to the planner's on one host, dearer between hosts, and zero where nothing moves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cp_engine.machines import MACHINES, machine
from cp_engine.prediction import (
    LAYOUT_CHOICES,
    Predictor,
    flat_time,
    one_gpu_time,
    place,
)
from cp_engine.sharding.cost import MIB, PRESETS
from cp_engine.sharding.exchange_choice import choose_exchange
from cp_engine.sharding.forest import build_forest
from cp_engine.sharding.layer_time import head_groups, kernel_time, step_time
from cp_engine.sharding.measure import TILE
from tests.forests import random_rows

H200 = MACHINES["h200"]
MODEL = PRESETS["qwen3-8b"]


def forest_of(seed: int):
    return random_rows(seed, rows=30, longest=300, vocabulary=2).forest


@pytest.mark.parametrize("model", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize("seed", range(6))
def test_one_host_is_what_the_planner_predicts(seed, model):
    for cp in (2, 4, 8):
        for layout in LAYOUT_CHOICES:
            gdn_layout = "same" if cp == 4 else "auto"
            placement = place(forest_of(seed), cp, layout, model, H200, gdn_layout)
            times = Predictor(placement, model).times(H200)
            known = choose_exchange(placement.survey, placement.layout, model=model).predicted
            assert {
                name: sum(int(part.total.max()) for part in each.attention) for name, each in times.items()
            } == known
            step = step_time(placement.figures, model)
            if placement.gdn is None:
                assert times["gather"].step == step.step
            else:
                attention = sum(int(part.total.max()) for part in step.attention) * model.attention_layers
                assert times["gather"].step == attention + placement.gdn.step(model) < step.step


def test_a_row_between_hosts_takes_the_adapter():
    """One trunk of 8,192 tokens on rank 0, read by three ranks, one of them on its host."""
    rows = [[0] * 8192 + [1 + i] * 8192 for i in range(3)]
    forest = build_forest(np.concatenate(rows), np.arange(4) * 16384)
    placement = place(forest, 4, "contiguous", MODEL, H200)
    assert placement.figures.rows_out.tolist() == [3 * 8192, 0, 0, 0]
    predictor = Predictor(placement, MODEL)
    split = machine("h200", 4, None, 2)
    near, far = predictor.times(H200)["gather"], predictor.times(split)["gather"]
    # Two of three readers are far: that link carries 16,384 rows, where the one on the host carries 8,192.
    groups, latency = head_groups(placement.figures, MODEL), split.links.latency + 2 * split.links.peer_latency
    as_near = 2 * 8192 * split.links.mib // split.costs.pull_mib
    fetch = as_near * MODEL.kv_row_bytes // groups * split.costs.pull_mib // MIB + latency
    figures = placement.figures
    work = kernel_time(int(figures.tiles[0]), 8192 // TILE, MODEL.query_heads, MODEL, split.costs)[0]
    exposed = fetch + (groups - 1) * max(0, fetch - work // groups)
    exposed += groups * fetch * split.costs.pull_slowdown_percent // 100
    assert far.attention[0].exposed[0] == exposed > near.attention[0].exposed[0]
    assert far.attention[0].compute[0] == near.attention[0].compute[0]
    for name, time in predictor.times(split).items():
        assert time.exposed >= predictor.times(H200)[name].exposed
    assert predictor.times(machine("h200", 4, None, 4))["ring"].step == predictor.times(H200)["ring"].step


@pytest.mark.parametrize("cp", [1, 3, 8, 24])
def test_links_without_cost_leave_only_compute(cp):
    """And in recurrent layers waits for the ranks that make states, which are gone when these passes cost nothing."""
    model = PRESETS["qwen3-next-80b-a3b"]
    predictor = Predictor(place(forest_of(3), cp, "balanced", model, H200), model)
    without = H200.with_free_links()
    passes = {f"chunk_{name}": 0 for name in ("summary", "adjoint", "states", "both_passes")}
    at_once = replace(without, costs=replace(without.costs, fold_mib=0, **passes))
    full, instant, free, idle = (predictor.times(each) for each in (H200, H200.with_instant_links(), without, at_once))
    for name in full:
        assert full[name].step >= instant[name].step >= free[name].step >= free[name].mean_compute
        assert full[name].mean_compute == free[name].mean_compute
        assert not any(part.exposed.any() for part in free[name].attention)
        assert idle[name].exposed == 0
    assert ("ulysses" in full) == (cp in (1, 8)) and {"gather", "ring"} <= set(full)


def test_flat_time_is_that_of_a_forest_that_shares_nothing():
    length = np.array([128, 640, 1280, 256])
    forest = build_forest(np.zeros(length.sum()), np.append(0, np.cumsum(length)), np.arange(4))
    for model in PRESETS.values():
        assert flat_time(length, model, H200) == one_gpu_time(forest, model, H200)


def test_buffers_are_those_of_the_planner():
    """The planner refuses an exchange exactly where its buffers pass the budget."""
    placement = place(forest_of(1), 4, "balanced", MODEL, H200)
    for name, time in Predictor(placement, MODEL).times(H200).items():
        for short in (0, 1):
            budget = time.buffer_bytes - short
            try:
                refused = choose_exchange(placement.survey, placement.layout, model=MODEL, memory_bytes=budget).refused
            except ValueError as error:
                refused = str(error)
            assert (name in refused) == bool(short)


def test_machines():
    assert machine("h200", 12, None, None).hosts(12) == 2
    assert machine("h200", 12, 3, 4).hosts(12) == 3
    with pytest.raises(ValueError, match=r"--nodes 2 with 4 GPUs each .* has 8: at least 3 nodes are needed"):
        machine("h200", 12, 2, 4)
    b200 = MACHINES["b200"].costs
    assert b200.tera_product == H200.costs.tera_product * 989 // 2250
    assert b200.pull_latency == H200.costs.pull_latency and b200.pull_mib == H200.costs.pull_mib // 2
