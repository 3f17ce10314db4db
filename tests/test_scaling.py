"""`plan --sweep`: what is predicted adds up, weak scaling keeps a rank's tokens, and limits have their causes."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import numpy as np
import pytest

from cp_engine.cli.plan import add_arguments, run
from cp_engine.machines import MACHINES
from cp_engine.model_sizes import model_sizes
from cp_engine.plan_report import PlanSettings
from cp_engine.prediction import Predictor, one_gpu_time, place
from cp_engine.rollouts import FlatRollouts, flatten_rollouts
from cp_engine.scaling import (
    SYNTHETIC,
    WEAK_TOKENS,
    WELL,
    parse_sweep,
    repeated,
    sweep,
    synthetic_rollouts,
    weak_forest,
)
from cp_engine.sharding.layout import contiguous_layout
from cp_engine.sharding.measure import Survey, measure
from tests.forests import random_rows

SETTINGS = PlanSettings(cp=1, model=model_sizes("qwen3-8b"), machine=MACHINES["h200"])


def plan(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(arguments))


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_batches(name):
    groups, trunk, rollouts, mean = SYNTHETIC[name]
    flat = synthetic_rollouts(name)
    forest = flat.forest()
    length = np.diff(flat.row_start) - trunk
    assert len(length) == flat.rollouts == groups * rollouts and flat.groups == groups
    assert mean // 2 <= length.min() and length.max() <= mean + mean // 2 + 1
    # Every group is a trunk of its own with one segment a rollout below it.
    assert forest.segments == groups * (1 + rollouts)
    assert forest.tokens == groups * trunk + length.sum() > 10**6
    assert np.array_equal(flat.token, synthetic_rollouts(name).token)


def test_a_million_tokens_on_512_ranks(capsys):
    """The command of docs/scaling.md: every row adds up, in seconds."""
    began = time.process_time()
    assert plan("--synthetic", "grpo_5k16", "--sweep", "cp=1,2,64,512", "--json") == 0
    assert time.process_time() - began < 30  # about 4 on one core of the machine that this was written on
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = report["sweep"]
    assert {(row["scaling"], row["cp"]) for row in rows} == {
        (s, p) for s in ("strong", "weak") for p in (1, 2, 64, 512)
    }
    for row in rows:
        if row["refused"] is not None:
            assert row["exchange"] == "ulysses" and row["cp"] > 32 and row["step_ms"] is None
            continue
        assert row["efficiency"] + sum(row["lost"].values()) == pytest.approx(1, abs=1e-3)
        assert row["speedup"] == pytest.approx(row["efficiency"] * row["cp"])
        assert row["hosts"] == max(1, row["cp"] // 8)
        largest = max(row["lost"], key=row["lost"].get)
        assert row["limit"] == ("none" if row["efficiency"] >= WELL else largest)
        if row["scaling"] == "weak":
            assert row["tree_tokens"] == pytest.approx(row["cp"] * WEAK_TOKENS, rel=0.05)
    strong = {(row["cp"], row["exchange"]): row for row in rows if row["scaling"] == "strong"}
    assert strong[1, "any"]["efficiency"] == 1
    assert strong[2, "gather"]["efficiency"] > 0.99 and strong[512, "gather"]["limit"] == "link"


def test_a_row_is_the_prediction():
    flat = flatten_rollouts(random_rows(4, rows=40, longest=400, vocabulary=4).rollouts())
    (row,) = (r for r in sweep(flat, [4], replace(SETTINGS, exchange="ring")) if r.scaling == "strong")
    model, machine = SETTINGS.model.shape, SETTINGS.machine
    placement = place(flat.forest(), 4, "balanced", model, machine)
    step = Predictor(placement, model).times(machine)["ring"].step
    alone = one_gpu_time(placement.forest, model, machine)
    assert row.step_ms == step / 1e6 and row.speedup == alone / step
    assert row.busiest_rows == placement.figures.busiest_rows


def test_limits_follow_their_causes():
    """A layout that is not balanced, a slow link and a late one each become the largest loss."""
    flat = synthetic_rollouts("grpo_5k16")
    end = int(flat.row_start[160])
    flat = replace(
        flat,
        token=flat.token[:end],
        row_start=flat.row_start[:161],
        group=flat.group[:160],
        loss_mask=flat.loss_mask[:end],
    )

    def limit(cp: int, **changed) -> str:
        rows = sweep(flat, [cp], replace(SETTINGS, **{"exchange": "gather", **changed}))
        return next(row.limit for row in rows if row.scaling == "strong")

    machine, links = SETTINGS.machine, replace(SETTINGS.machine.links, ranks=2)
    assert limit(4) == "none"
    assert limit(24, machine=replace(machine, links=replace(links, mib=10**6))) == "link"
    assert limit(24, machine=replace(machine, links=replace(links, latency=10**8))) == "latency"
    # A rollout of 65,536 tokens before 128 of 512: in equal halves, one has nearly all pairs.
    lengths = [65_536] + [512] * 128
    row_start = np.append(0, np.cumsum(lengths))
    token = np.zeros(row_start[-1], np.int64)
    token[row_start[:-1]] = np.arange(129)
    deep = FlatRollouts(token, row_start, np.arange(129), np.ones(len(token), bool), None)
    uneven = next(sweep(deep, [2], replace(SETTINGS, layout="contiguous", exchange="gather")))
    even = next(sweep(deep, [2], replace(SETTINGS, exchange="gather")))
    assert uneven.limit == "balance" and uneven.lost["balance"] > 0.2 and even.lost["balance"] < 0.01


@pytest.mark.parametrize("share", ["batch", "group"])
@pytest.mark.parametrize("seed", range(8))
def test_weak_forests(seed, share):
    rows = random_rows(seed, rows=25, longest=30, share=share)
    flat = flatten_rollouts(rows.rollouts())
    forest = flat.forest(share)
    sizes = []
    for count in range(1, flat.rollouts + 1):
        part = type(rows)(rows.rows[:count], rows.groups[:count], share)
        sizes.append(part.forest.tokens)
    for tokens in range(1, forest.tokens):
        got = weak_forest(flat, forest, share, tokens).tokens
        assert got in sizes and abs(got - tokens) == min(abs(size - tokens) for size in sizes)
    assert weak_forest(flat, forest, share, 3 * forest.tokens).tokens == 3 * forest.tokens


def test_repeated_forests_share_nothing():
    forest = random_rows(2, rows=20, longest=30).forest
    thrice = repeated(forest, 3)
    one, three = (measure(Survey(each), contiguous_layout(each, 1)) for each in (forest, thrice))
    assert thrice.tree_pairs == 3 * forest.tree_pairs and three.pairs == 3 * one.pairs
    assert thrice.flat_tokens == 3 * forest.flat_tokens and thrice.max_depth == forest.max_depth
    apart = measure(Survey(thrice), contiguous_layout(thrice, 3))
    assert apart.rows_in.sum() == 0 and len(set(apart.pairs.tolist())) == 1


def test_the_table_names_what_limits(tmp_path, capsys):
    assert plan("--rollouts", "launch/data/sample.jsonl", "--sweep", "cp=1,4,48", "--share", "group") == 0
    text = capsys.readouterr().out
    assert "strong scaling, one forest: qwen3-8b on h200" in text and "weak scaling, about 16,384" in text
    assert "latency" in text and "ulysses cannot run at cp 48: 32 query heads are not divisible by 48 ranks" in text


def test_wrong_sweeps_are_refused():
    assert parse_sweep("cp=8,1, 2,8") == [1, 2, 8]
    for text in ("1,2", "cp=", "cp=0", "cp=2,x", "dp=2", "cp=1,,2"):
        with pytest.raises(ValueError, match="--sweep expects rank counts of at least 1, as in cp=1,2,4,8"):
            parse_sweep(text)
    for options in (("--picture", "a.svg"), ("--max-pack-tokens", "8")):
        with pytest.raises(ValueError, match=f"--sweep takes all rollouts as one pack .* leave {options[0]} out"):
            plan("--rollouts", "launch/data/sample.jsonl", "--sweep", "cp=2", *options)
    with pytest.raises(ValueError, match="16 context-parallel ranks need 16 GPUs, but --nodes 1"):
        plan("--rollouts", "launch/data/sample.jsonl", "--sweep", "cp=1,16", "--nodes", "1")
