"""The GDN benchmark in Triton's interpreter, on small forests in float32; `test_gdn_benchmark.py` runs this file."""

import tests.kernels.interpreted  # isort: skip  # noqa: F401  # before anything that imports Triton

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from benchmarks import (
    gdn,
    gdn_check,
    gdn_layer,
    gdn_layer_options,
    gdn_ranks,
    gdn_rivals,
    gdn_stages,
    gdn_sweep,
    gdn_tuning,
)
from benchmarks.gdn_stages import STAGES
from benchmarks.gdn_workloads import NAMES, Problem
from benchmarks.report import page
from cp_engine.kernels import gates
from cp_engine.kernels.gdn.triton import launch, output, packing, walks
from cp_engine.kernels.gdn.triton.primitives import Sizes
from cp_engine.layers import gdn as layer
from cp_engine.layers.gdn_tables import GdnHeads, gdn_tables
from tests.gdn_oracle import forest_of_segments

CHAIN_TABLES = importlib.import_module("cp_engine.kernels.gdn.triton.chain_tables")
MOST_TWIGS = CHAIN_TABLES.MOST_TWIGS
HEADS = GdnHeads(1, 2, 16, 16)
SEGMENTS = [(-1, 66), (0, 5), (0, 3), (-1, 2)]
HEADS_OF_TWO = GdnHeads(2, 2, 16, 16)
FLOAT32 = 1e-5
NO_FLOOR = dict.fromkeys(NAMES, 0.0)


def small(forest, sample_tokens=140) -> Problem:
    """Of the rollouts of `SEGMENTS` (66, 71, 69 and 2 tokens) the first two and the last are in the sample."""
    return Problem.make(forest, HEADS, "cpu", torch.float32, sample_tokens)


@pytest.fixture(autouse=True)
def one_option(monkeypatch):
    gdn_tuning.keep_option(0)
    monkeypatch.setattr(gdn, "median_ms", lambda call, device: 1.0)
    monkeypatch.setattr(gdn_stages, "REPEATS", 1)
    monkeypatch.setattr(gdn_sweep, "REPEATS", 1)
    # Faults are planted where short fragments have chunks of their own, and all of them are chains.
    monkeypatch.setattr(packing, "LEAST_SPARED", 2.0)
    monkeypatch.setattr(CHAIN_TABLES, "MOST_TWIGS", 0)


@pytest.fixture
def plain_rule(monkeypatch):
    """fla's operator in plain torch, token by token: its own state kernels do not run in the interpreter."""
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    def rule(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens):
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        outs, finals = [], []
        for i, (begin, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
            own = (x[:, begin:end] for x in (q, k, v, beta, g))
            above = None if initial_state is None else initial_state[i][None]
            out, final = naive_recurrent_gated_delta_rule(*own, initial_state=above, output_final_state=True)
            outs.append(out)
            finals.append(final)
        return torch.cat(outs, 1), torch.cat(finals)

    monkeypatch.setattr(gdn_rivals, "fla_rule", lambda: rule)


def test_every_method_is_right_and_compared(plain_rule):
    forest = forest_of_segments(SEGMENTS)
    records = gdn.run_workload("toy", list(gdn_rivals.METHODS), forest, small)
    by_method = {record["method"]: record for record in records}
    assert set(by_method) == set(gdn_rivals.METHODS)
    for record in records:
        assert record["right"] and not record["timing_only"] and set(record["errors"]) == set(NAMES), record
        assert max(record["max_err"], record["segment_err"]) <= FLOAT32, record
    stages = by_method["tree"]["stages"]
    assert set(stages["fwd"]) == {"cumsum", "solve", "states", "output", "rest"}
    of_packed, only_forward = {"products", "inverse"}, {"cumsum", "solve", "output"}
    assert set(stages["bwd"]) == set(STAGES) - of_packed - only_forward | {"rest"}
    assert by_method["tree"]["tokens"] == 76 and by_method["flat"]["tokens"] == forest.flat_tokens == 208
    assert by_method["tree"]["chunks"] == 5 and by_method["straight"]["chunks"] == 2
    gdn.compare(records, by_method["flat"])
    assert by_method["tree"]["vs_many"] == pytest.approx(208 / 76, abs=1e-3) and by_method["tree"]["vs_flat"] == 1.0
    assert by_method["straight"]["vs_flat"] is None
    gdn.show(records)


def with_tables(monkeypatch, change):
    made = gdn_rivals.tables_of

    def tables_of(forest, device):
        tables = made(forest, device)
        (wave,) = tables.waves
        return replace(tables, waves=(change(wave),)) if wave.slots > 1 else tables

    monkeypatch.setattr(gdn_rivals, "tables_of", tables_of)


def forgotten_entry_states(walk):
    chains = walk.chains.clone()
    chains[:, 2] = 0
    return replace(walk, chains=chains)


def missing_branch_sum(walk):
    ends = walk.reader_ptr.clone()
    ends[-1] -= 1
    return replace(walk, reader_ptr=ends)


FORK = [(-1, 20), (0, 5), (0, 3)]


def test_a_wrong_tree_gets_no_speed_up(monkeypatch):
    with_tables(monkeypatch, forgotten_entry_states)
    problem = small(forest_of_segments(FORK))
    found = gdn_check.check(gdn_rivals.METHODS["tree"], problem, NO_FLOOR)
    assert not found["right"] and found["errors"]["o"][1] > 0.1
    timed = {"fwd_ms": 1.0, "bwd_ms": 3.0, "tokens": 28}
    records = [{"method": "tree", **timed, **found}, {"method": "flat", **timed, **found, "right": True}]
    gdn.compare(records, records[1])
    assert records[0]["vs_flat"] is None and records[0]["vs_many"] is None and records[1]["vs_flat"] == 1.0
    # Nor does it get one from wrong rollouts alone.
    records[0]["right"], records[1]["right"] = True, False
    gdn.compare(records, records[1])
    assert records[0]["vs_flat"] is None and records[0]["vs_many"] is None


def test_what_is_not_finite_is_wrong(monkeypatch):
    problem = small(forest_of_segments(FORK), 48)
    gradients = gdn_rivals.Ours.gradients
    row = int((problem.sample_row < 0).nonzero()[0])

    def broken(self):
        found = gradients(self)
        found[1][row] = float("nan")
        return found

    monkeypatch.setattr(gdn_rivals.Ours, "gradients", broken)
    assert not gdn_check.check(gdn_rivals.METHODS["tree"], problem, NO_FLOOR)["right"]


def test_a_missing_branch_sum_is_seen(monkeypatch):
    with_tables(monkeypatch, missing_branch_sum)
    problem = small(forest_of_segments(FORK))
    found = gdn_check.check(gdn_rivals.METHODS["tree"], problem, NO_FLOOR)
    assert not found["right"] and found["errors"]["o"][0] <= FLOAT32 < found["errors"]["dk"][0]


def test_levels_with_swapped_states_are_wrong(monkeypatch, plain_rule):
    made = gdn_rivals.levels_of
    forest = forest_of_segments([(-1, 30), (-1, 20), (0, 5), (1, 5)])
    problem = small(forest)
    floor = gdn_check.floor_of(problem)
    assert gdn_check.check(gdn_rivals.METHODS["fla_levels"], problem, floor)["right"]

    def swapped(forest, device):
        levels = made(forest, device)
        return [replace(x, parent=None if x.parent is None else x.parent.flip(0)) for x in levels]

    monkeypatch.setattr(gdn_rivals, "levels_of", swapped)
    assert not gdn_check.check(gdn_rivals.METHODS["fla_levels"], problem, floor)["right"]


def test_gradients_outside_the_sample_are_seen(monkeypatch):
    problem = small(forest_of_segments(FORK), 48)
    outside = gdn_rivals.Ours.gradients
    assert (problem.sample_row < 0).any()

    def leaking(self):
        return tuple(x + 1e-30 * (problem.sample_row < 0).view(-1, *[1] * (x.dim() - 1)) for x in outside(self))

    monkeypatch.setattr(gdn_rivals.Ours, "gradients", leaking)
    found = gdn_check.check(gdn_rivals.METHODS["tree"], problem, NO_FLOOR)
    assert not found["right"] and max(found["max_err"], found["segment_err"]) <= FLOAT32


OF_TOY = {"output": [Sizes(16, 4, 1), Sizes(16, 8, 1)]}


def test_sweep_checks_every_option_and_restores_ours(monkeypatch, capsys):
    problem = small(forest_of_segments(FORK))
    before = [gdn_tuning.sizes_of(kernel) for kernel in gdn_tuning.SWEEP]
    kept, taken = [], []
    run_output = output.run_output
    monkeypatch.setattr(walks, "run_output", lambda *rows: (taken.append(output.OUTPUT), run_output(*rows)))
    records = gdn_sweep.sweep({"toy": lambda: problem}, OF_TOY, keep=kept.append)
    assert set(OF_TOY["output"]) < set(taken)
    assert [gdn_tuning.sizes_of(kernel) for kernel in gdn_tuning.SWEEP] == before
    assert kept == records and [r["kernel"] for r in records][0] == gdn_sweep.IN_USE
    assert [r["kernel"] for r in records][-1] == "all"
    of_options = records[1:-1]
    every = [(family, sizes) for family, some in OF_TOY.items() for sizes in some]
    assert [r["method"] for r in of_options] == [gdn_sweep.method_of(*option) for option in every]
    for r in records:
        assert r["right"] and r["ms"] > 0 and r["max_apart"] <= FLOAT32, r
    assert set(of_options[0]["stage_ms"]) == {"fwd output"}
    printed = capsys.readouterr().out
    assert "best together, against float64: right True" in printed


def test_sweep_goes_on_after_an_option_that_fails(monkeypatch, capsys):
    problem = small(forest_of_segments(FORK))
    run_output = output.run_output

    def refuses(*rows):
        if output.OUTPUT.warps == 99:
            raise RuntimeError("out of resources: shared memory")
        run_output(*rows)

    monkeypatch.setattr(walks, "run_output", refuses)
    records = gdn_sweep.sweep({"toy": lambda: problem}, {"output": [Sizes(16, 99, 1), Sizes(16, 4, 1)]})
    assert [r["kernel"] for r in records] == [gdn_sweep.IN_USE, "output", "all"]
    assert "toy output, 16 columns, 99 warps, 1 stages: RuntimeError: out of resources" in capsys.readouterr().out


def test_sweep_calls_wrong_values_wrong(monkeypatch):
    problem = small(forest_of_segments(FORK))
    results = gdn_sweep.Subject.results
    calls = []

    def broken(self):
        found = results(self)
        calls.append(found)
        if len(calls) == 2:
            found[2] = found[2] * 1.02
        return found

    monkeypatch.setattr(gdn_sweep.Subject, "results", broken)
    records = gdn_sweep.sweep({"toy": lambda: problem}, {"output": [Sizes(16, 4, 1)]})
    assert [r["right"] for r in records] == [True, False, True]
    assert records[-1]["method"] == gdn_sweep.IN_USE


@contextmanager
def launches() -> Iterator[set[tuple]]:
    """The kernels that run inside, each with the values it is compiled for."""
    found, call = set(), GridExecutor.__call__

    def record(self, *arguments, **named):
        values = zip(self.arg_names, arguments, strict=False)
        compiled = {name: value for name, value in (*values, *named.items()) if name in self.constexprs}
        found.add((self.fn.__name__, *sorted(compiled.items())))
        return call(self, *arguments, **named)

    with mock.patch.object(GridExecutor, "__call__", record):
        yield found


def test_what_the_benchmarks_launch_is_compiled_ahead(plain_rule, monkeypatch):
    monkeypatch.setattr(CHAIN_TABLES, "MOST_TWIGS", MOST_TWIGS)
    for module, name in ((launch, "WIDE_FROM"), (packing, "LEAST_SPARED")):
        monkeypatch.setattr(module, name, getattr(module, name))  # back to what they were after it
    options = HEADS_OF_TWO, "cpu", torch.float32
    with launches() as compiled:
        gdn_tuning.compile_kernels(1, *options)
    with launches() as of_layer:
        gdn_tuning.compile_layer(1, *options)
        gdn_tuning.compile_layer(gdn_tuning.SHARES, *options)
    problem = Problem.make(forest_of_segments(SEGMENTS), *options, 140)
    launched = {}
    for spared in (0.0, 2.0):
        monkeypatch.setattr(packing, "LEAST_SPARED", spared)
        with launches() as launched[spared]:
            run = gdn_rivals.Ours(problem.forest, problem.inputs, problem.dout)
            run.forward()
            run.backward()
        assert run.tables.packed == (spared == 0.0) and len(launched[spared]) > 5
        assert launched[spared] <= compiled, launched[spared] - compiled
    assert launched[0.0] - launched[2.0], "chunks of several fragments take kernels of their own"
    only_ranks = {(name, *pair) for name, *pairs in of_layer - compiled for pair in pairs}
    assert only_ranks >= {("_adjoint_kernel", "EXITS", True), ("_state_kernel", "KEEP", False)}


def test_the_refusal_of_fla_is_lifted_for_the_time_of_a_measurement(monkeypatch):
    from fla.ops.common import chunk_o

    for name, value in {"IS_NVIDIA_HOPPER": True, "TRITON_ABOVE_3_4_0": True, "TRITON_ABOVE_3_7_1": False}.items():
        assert hasattr(chunk_o, name)
        monkeypatch.setattr(chunk_o, name, value)
    assert gdn_rivals.fla_refuses()
    rows = [torch.zeros(1, 4, 1, 16) for _ in range(6)]
    call = dict(zip(("q", "k", "v", "do", "h", "dh"), rows, strict=True), g=torch.zeros(1, 4, 1))
    with pytest.raises(RuntimeError, match="#640"):
        chunk_o.chunk_bwd_dqkwg(**call)
    with gdn_rivals.fla_refusal_lifted():
        assert not gdn_rivals.fla_refuses()
    assert gdn_rivals.fla_refuses()


def test_where_fla_refuses_only_values_are_compared(monkeypatch, plain_rule):
    monkeypatch.setattr(gdn_check, "fla_refuses", lambda: True)
    records = gdn.run_workload("toy", ["fla_levels"], forest_of_segments(FORK), small)
    flat = {"method": "flat", "fwd_ms": 1.0, "bwd_ms": 3.0, "tokens": 68, "right": True, "timing_only": False}
    gdn.compare([*records, flat], flat)
    assert records[0]["timing_only"] and set(records[0]["errors"]) == {"o"}
    assert records[0]["right"] and records[0]["vs_flat"] is None and records[0]["vs_many"] is not None


def test_flat_parts_hold_every_rollout_once():
    forest = forest_of_segments(SEGMENTS)
    parts = list(gdn_rivals.flat_parts(forest, 140))
    assert np.array_equal(np.concatenate([part.token for part in parts]), forest.flat_to_tree())
    assert max(part.forest.tokens for part in parts) <= 140 and len(parts) == 2
    owners = np.concatenate([part.token[part.owner] for part in parts])
    assert np.array_equal(np.sort(owners), np.arange(forest.tokens))


@pytest.fixture
def layer_on_triton(monkeypatch):
    for module in (gates, gates.api):
        monkeypatch.setattr(module, "choose", lambda x: "triton")
    monkeypatch.setattr(layer.gdn, "choose", lambda *_: "triton")
    monkeypatch.setattr(gdn_layer, "median_ms", lambda call, device: 1.0)


def whole_layer():
    module = gdn_ranks.layer_module(HEADS, 32, torch.device("cpu"), torch.float32)
    return module, gdn_ranks.Problem.make(forest_of_segments([(-1, 20), (0, 5), (0, 3)]), module)


def test_stages_of_the_whole_layer(layer_on_triton, capsys):
    found = gdn_layer.measure(*whole_layer())
    assert found["right"] and 0 < max(found["errors"].values()) < FLOAT32
    forward = {"projections", "gates", "qkv", "cumsum", "solve", "states", "output", "norm", "rest"}
    backward = {"norm_backward", "qkv", "qkv_backward", "rows_backward", "gates_backward", "adjoint", "dqkwg"}
    assert set(found["fwd"]) == forward and set(found["bwd"]) >= backward
    gdn_layer.show(found)
    assert "gates_backward" in capsys.readouterr().out
    ours, library = gdn_layer.records_of("toy", 28, found)
    assert (ours["fwd_ms"], ours["bwd_ms"], ours["max_err"]) == (1.0, 0.0, max(ours["errors"].values()))
    stamped = {"commit": "abc", "versions": {}, "card": "a card", "command": "x", "date": "2026-01-01"}
    text = page([ours | stamped, library | stamped])
    assert "| toy | ours | 28 | 1.00 | 0.00 | 1.00 | 5.00 + 5.00 |" in text
    assert "| toy | library gates | 28 | 1.00 | 0.00 | 1.00 | – | – |" in text
    assert "| toy | ours | bwd | gates_backward |" in text


def test_a_wrong_gate_is_seen(layer_on_triton, monkeypatch):
    right = gates.api.triton.gated_norm
    monkeypatch.setattr(gates.api.triton, "gated_norm", lambda x, gate, *rest: right(x, -gate, *rest))
    found = gdn_layer.measure(*whole_layer())
    assert not found["right"] and not gdn_layer.records_of("toy", 28, found)[0]["right"]


def test_launch_options_of_the_layer(monkeypatch):
    """Every option gives the same results, and one that does not is called wrong."""
    module, problem = whole_layer()
    tables = gdn_tables(gdn_layer.plan_of(problem.forest), 0)
    weight = module.conv1d.weight.detach().squeeze(1)
    calls = gdn_layer_options.stage_calls(weight, tables, HEADS, 1e-6)
    monkeypatch.setattr(gdn_layer_options, "median_ms", lambda call, device: 1.0)
    found = gdn_layer_options.time_options(calls, weight.device)
    assert set(found) == set(gdn_layer_options.OPTIONS)
    assert all(ms == 1.0 for times in found.values() for ms in times.values())
    backward = calls["norm_backward"]
    calls["norm_backward"] = lambda: [x * gates.api.triton.BACKWARD_ROWS for x in backward()]
    wrong = gdn_layer_options.time_options(calls, weight.device)["norm_backward"]
    assert {option: ms is None for option, ms in wrong.items()} == {option: option[0] != 16 for option in wrong}
    gdn_layer_options.show_options(found | {"norm_backward": wrong})
