"""The attention benchmark on a CPU: its trees, its truth, its rivals' bookkeeping, and what it refuses to print."""

import json
import os
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks import attention, attention_rivals, attention_workloads, clock
from benchmarks.attention_flat import FlatPadded, flat_calls, split_by_length
from benchmarks.attention_problem import Problem, make_problem
from benchmarks.attention_rivals import METHODS, Backend, Flex, block_mask, one_call
from benchmarks.attention_workloads import WORKLOADS, Workload, one_gpu_forest, workload_forest
from benchmarks.child import in_child
from benchmarks.record import append
from tests import dense_rivals
from tests.kernels.attention_oracle import Tensors, dense_attention, visible

CPU = torch.device("cpu")
TOY = Workload("toy", 8, 4, 16)
TINY = {"toy": (2, 150, [40, 130, 7, 60]), "one_row": (1, 0, [200])}


@pytest.fixture(autouse=True)
def tiny_trees():
    workload_forest.cache_clear()
    with (
        mock.patch.dict(attention_workloads.PROMPTS, TINY),
        mock.patch.dict(WORKLOADS, toy=TOY),
        mock.patch.multiple(clock, REPEATS=2, FEWEST=1, WARM_UPS=0),
    ):
        yield
    workload_forest.cache_clear()


def toy_problem(dtype=torch.float64) -> Problem:
    return make_problem(TOY, device=CPU, dtype=dtype)


class Planted(Backend):
    """Computes everything, then spoils one segment's rows of one result."""

    def __init__(self, problem: Problem, spoil: str, by: float):
        super().__init__(problem, "reference")
        self.spoil, self.by = spoil, by

    def results_into(self, found):
        super().results_into(found)
        spoilt = found[self.spoil].clone()
        rows = slice(*self.problem.forest.segment_start[3:5].tolist())
        spoilt[rows] *= 1 + self.by
        found[self.spoil] = spoilt


def test_sizes_of_the_workloads():
    art = workload_forest("art_5k16x100", 2)
    assert (art.tokens, len(art.rollout_length), int(art.rollout_length.max())) == (81_920, 13 * 16, 5_100)
    family = 5000 * 5001 // 2 + 16 * (100 * 5000 + 100 * 101 // 2)
    last = 1120 * 1121 // 2 + 16 * (100 * 1120 + 100 * 101 // 2)
    assert art.tree_pairs == 12 * family + last
    assert [workload_forest("art_5k16x100", gpus).tokens for gpus in (1, 4, 8)] == [40_960, 163_840, 327_680]
    shapes = {name: workload_forest(WORKLOADS[name].tree) for name in ("dualkv_16k28", "d256_16k16", "chain_128k")}
    assert [f.tokens for f in shapes.values()] == [73_728, 49_152, 131_072]
    assert round(shapes["dualkv_16k28"].flat_pairs / shapes["dualkv_16k28"].tree_pairs, 2) == 4.20


def test_pairs_of_a_gpu_stay_the_same():
    for tree in ("toy", "grpo_5k16"):
        once, twice = workload_forest(tree, 1), workload_forest(tree, 2)
        assert (twice.tokens, twice.tree_pairs) == (2 * once.tokens, 2 * once.tree_pairs)
    for tree, near in (("toy", 0), ("chain_128k", 1e-4), ("art_5k16x100", 0.04)):
        for gpus in (2, 4):
            share = workload_forest(tree, gpus).tree_pairs / gpus
            assert abs(one_gpu_forest(tree, gpus).tree_pairs / share - 1) <= near, (tree, gpus)


def test_the_truth_is_dense_attention():
    problem = toy_problem()
    x = Tensors(problem.q, problem.k, problem.v, problem.dout)
    dense = dense_attention(visible(problem.forest), x)
    assert problem.checked_heads == {"out": [0, 1, 6, 7], "dq": [0, 1, 6, 7], "dk": [0, 3], "dv": [0, 3]}
    for name, true in problem.truth.items():
        difference = (dense[name][:, problem.checked_heads[name]] - true).abs().max()
        assert float(difference / true.abs().max()) < 1e-13, name


def test_flat_rollouts_in_several_calls_add_up_to_the_tree():
    problem = toy_problem()
    with mock.patch.dict(METHODS, flat_fa2=partial(flat_calls, kind=FlatPadded, most=400)):
        calls = list(METHODS["flat_fa2"](problem))
        assert sum(len(call.lengths) for call in calls) == 8 and len(calls) > 3
        assert all(len(call.lengths) == 1 or call.lengths.numel() * call.longest <= 400 for call in calls)
        (record,) = attention.run_workload("toy", ["flat_fa2"], None, CPU, dtype=torch.float64)
    assert record["max_err"] < 1e-6  # sums are in float32


def test_rivals_compute_the_tree():
    rivals = ["flat_fa2", "flat_fa4", "cudnn_raw"]
    with dense_rivals.installed():
        records = attention.run_workload("toy", rivals, None, CPU, dtype=torch.float64)
    assert [record["method"] for record in records] == rivals
    assert all(record["max_err"] < 1e-6 for record in records)
    assert min(record["vs_best"] for record in records) == 1 and records[2]["vs_flat"] > 0


def test_rollouts_are_grouped_by_length():
    groups = split_by_length(np.array([5, 1, 9, 2, 2]), 8)
    assert [group.tolist() for group in groups] == [[1, 3, 4], [0], [2]]


def test_flex_attention_sees_the_tree():
    from torch.nn.attention.flex_attention import create_block_mask

    problem = toy_problem()
    end = torch.as_tensor(problem.forest.subtree_end[problem.forest.segment_of])
    tokens = problem.forest.tokens
    wanted = create_block_mask(lambda b, h, q, k: (k <= q) & (q < end[k]), None, None, tokens, tokens, device="cpu")
    with mock.patch.object(attention_rivals, "MASK_ROWS", 256):
        made = block_mask(problem.forest, CPU)
    assert made.shape == wanted.shape and made.BLOCK_SIZE == wanted.BLOCK_SIZE
    for part in ("kv", "full_kv", "q", "full_q"):
        counts, wanted_counts = getattr(made, f"{part}_num_blocks"), getattr(wanted, f"{part}_num_blocks")
        assert torch.equal(counts, wanted_counts) and counts.dtype == wanted_counts.dtype
        index, wanted_index = getattr(made, f"{part}_indices"), getattr(wanted, f"{part}_indices")
        live = torch.arange(index.shape[-1]) < counts[..., None]
        assert torch.equal(index[live], wanted_index[live]) and index.shape == wanted_index.shape
    with mock.patch.object(torch, "compile", lambda call, **_: call):
        flex = Flex(problem)
    flex.q, flex.k, flex.v = (x.detach() for x in (flex.q, flex.k, flex.v))  # it has no backward on a CPU
    flex.forward()
    out = flex.rows(flex.out)[:, problem.checked_heads["out"]]
    assert float((out - problem.truth["out"]).abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("spoil", "by", "wrong"), [("dv", 0.02, True), ("out", 0.02, True), ("dk", 1.0, True), ("dq", 0.0, False)]
)
def test_wrong_outputs_get_no_speed_up(spoil, by, wrong):
    fast = partial(one_call, kind=partial(Planted, spoil=spoil, by=by))
    flat = partial(flat_calls, kind=FlatPadded)
    with mock.patch.dict(METHODS, cudnn=fast, flat_fa2=flat, flex=fast):
        records = attention.run_workload("toy", ["flex", "cudnn", "flat_fa2"], None, CPU, dtype=torch.float32)
    flex, cudnn, flat_record = records
    for record in (flex, cudnn):
        assert (record["vs_flat"] is None) == wrong and (record["vs_best"] is None) == wrong
        assert (record["max_err"] > 1e-2) == wrong
    assert flat_record["vs_flat"] == 1
    total = {r["method"]: r["fwd_ms"] + r["bwd_ms"] for r in records}
    best = total["flat_fa2"] if wrong else min(total["flat_fa2"], total["flex"])
    assert flat_record["vs_best"] == pytest.approx(total["flat_fa2"] / best, abs=1e-3)


def test_results_that_are_not_finite_are_wrong():
    problem = toy_problem()
    heads = {"out": 8, "dq": 8, "dk": 4, "dv": 4}
    results = {name: torch.zeros(problem.forest.tokens, heads[name], 16) for name in heads}
    assert problem.error(results) == 1
    results["dv"][17, 0, 3] = torch.nan
    assert problem.error(results) is None
    record = {"method": "auto", "max_err": None, "fwd_ms": 1.0, "bwd_ms": 1.0}
    attention.compare([record])
    assert record["vs_flat"] is None and record["vs_best"] is None


def test_a_method_that_fails_is_a_gap(capsys):
    records = attention.run_workload("toy", ["fa9", "cudnn_raw", "auto"], None, CPU, dtype=torch.float32)
    assert [record["method"] for record in records] == ["auto"]
    shown = capsys.readouterr().out
    assert "KeyError: 'fa9'" in shown and "cudnn_raw" in shown and "auto" in shown


@pytest.mark.parametrize("stop", [SystemExit(143), KeyboardInterrupt()])
def test_what_is_finished_is_recorded_when_a_run_is_stopped(stop):
    def stopped(problem):
        raise stop

    kept = []
    with mock.patch.dict(METHODS, cudnn_raw=stopped), pytest.raises(type(stop)):
        methods = ["auto", "cudnn_raw", "flex"]
        attention.run_workload("toy", methods, None, CPU, kept.extend, dtype=torch.float32)
    (record,) = kept
    assert record["method"] == "auto" and record["predicted_ms"] > 0 and record["vs_best"] is None


def abort() -> None:
    os.abort()


def test_a_process_that_dies_is_an_error_of_its_method():
    assert in_child(sorted, [2, 1]) == [1, 2]
    with pytest.raises(RuntimeError, match="TypeError: 'int' object is not iterable"):
        in_child(sorted, 3)
    with pytest.raises(RuntimeError, match="its process ended with exit code -6"):
        in_child(abort)


def test_records_are_json_lines_in_the_file_asked_for(tmp_path):
    records = attention.run_workload("toy", ["auto"], None, CPU, dtype=torch.float32)
    append(records, {"commit": "abc"}, tmp_path / "rows.jsonl")
    append(records, {"commit": "abd"}, tmp_path / "rows.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [line["commit"] for line in lines] == ["abc", "abd"]
    wanted = "bench workload method exchange layout gpus tokens fwd_ms bwd_ms tflops_fwd tflops_bwd vs_flat vs_best"
    wanted += " max_err peak_gib moved_mib exposed_ms pair_ratio predicted_ms seconds commit"
    assert set(lines[0]) == set(wanted.split()) and lines[0]["predicted_ms"] > 0
    arguments = attention.arguments_of(["--record", "--results", str(tmp_path / "rows.jsonl")])
    assert arguments.results == tmp_path / "rows.jsonl"
    assert set(arguments.methods) == set(METHODS) - {"flex_tuned"}
    assert {"flex_fa4", "cudnn_fa4"} <= set(arguments.methods)
