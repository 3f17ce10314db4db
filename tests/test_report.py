"""The page of benchmarks: one section a bench, the last record of a case, every case that has to be explained."""

import json

from benchmarks.attention_rivals import METHODS
from benchmarks.record import RESULTS
from benchmarks.report import GONE, RIVALS, page

STAMPED = {
    "commit": "abc",
    "versions": {"python": "3"},
    "card": "a card",
    "command": "python -m x",
    "date": "2026-01-01",
}


def test_a_bench_without_a_writer_gets_all_its_columns():
    one = {"bench": "newest", "workload": "game24", "method": "ours", "fwd_ms": 1.23456, "gpus": 2, "none": None}
    text = page([one | STAMPED, one | {"fwd_ms": 2.0} | STAMPED, one | {"method": "other"} | STAMPED])
    assert "## Newest" in text and "\n| workload | method | fwd_ms | gpus |\n" in text
    assert "| game24 | ours | 2 | 2 |" in text and "| game24 | other | 1.235 | 2 |" in text  # repeated: the last counts
    assert text.count("commit abc, a card, python 3: `python -m x`") == 1


def test_methods_that_are_gone_are_named_without_figures():
    one = {"bench": "gdn-sweep", "workload": "game24", "method": "in use", "ms": 1.5} | STAMPED
    gone = one | {"method": GONE["gdn-sweep"][0], "ms": 9.5, "command": "python -m old"}
    text = page([one, gone])
    assert "| game24 | in use | 1.5 |" in text and "9.5" not in text and "python -m old" not in text
    assert f"Measured before, no longer offered: {GONE['gdn-sweep'][0]}.\n" in text
    assert "no longer offered" not in page([one])
    records = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    measured = {r["method"] for r in records if r["bench"] == "attention"}
    assert measured - set(METHODS) == set(GONE["attention"]), "what is shown can be run"


def test_a_search_that_is_not_repeated_stays():
    record = STAMPED | {"bench": "other", "workload": "x", "largest": 4, "ms": 1}
    later = STAMPED | {"bench": "other", "workload": "x", "ms": 2}
    assert "| 4 | x | 2 |" in page([record, later]) and "| 8 | x | 1 |" in page([record, record | {"largest": 8}])


def test_the_same_step_with_other_weights_is_another_case():
    one = {"bench": "newest", "workload": "toy", "weights": "LoRA 16", "ms": 1.0} | STAMPED
    text = page([one, one | {"weights": "full", "ms": 2.0}])
    assert "| toy | LoRA 16 | 1 |" in text and "| toy | full | 2 |" in text


def test_layouts_over_a_bar_are_listed_below_their_table():
    figures = dict.fromkeys(("pair_imbalance", "mean_pieces", "tile_imbalance", "exposed"), 1.0)
    figures |= dict.fromkeys(("rows_in", "rows_out", "contiguous_rows_in", "contiguous_rows_out"), 7)
    figures |= {f"step_over_{rival}": 0.5 for rival in RIVALS}
    row = {"bench": "planner-quality", "workload": "toy", "model": "m", "P": 2, "packs": 3, "token_spread": 0}
    row |= figures | {f"mean_{key}": value for key, value in figures.items() if key != "mean_pieces"}
    text = page([row | {"most_pieces": 2, "broken": ["pack 0: pairs"], "listed": ["pack 1: rows"]} | STAMPED])
    assert "| m | toy | 2 | 3 | 0 | 1.0000 | 2 (1.00) |" in text
    assert "3 layouts; 1 break a limit" in text
    assert "- m, toy, P 2, pack 0: pairs\n- m, toy, P 2, pack 1: rows\n" in text


def test_attention_has_a_table_a_workload_and_one_of_several_gpus():
    figures = {"fwd_ms": 5.0, "bwd_ms": 16.5, "tflops_fwd": 250.4, "tflops_bwd": 223.8, "max_err": 0.0025}
    figures |= {"peak_gib": 31.7, "vs_best": 0.58, "tokens": 196818, "pair_ratio": 11.05, "bench": "attention"}
    one = figures | {"workload": "game24", "method": "auto", "gpus": 1, "vs_flat": None} | STAMPED
    two = figures | {"workload": "art", "method": "auto", "gpus": 2, "layout": "spread", "exchange": "gather"}
    two["transport"] = "peer"
    two |= {"exposed_ms": 0.31, "moved_mib": 120.5, "efficiency": 0.97, "predicted_ms": 15.4} | STAMPED
    text = page([one, one | {"method": "flex", "fwd_ms": 10.0}, two, two | {"exchange": "ring", "efficiency": None}])
    assert "### game24: 196,818 tokens, pair ratio 11.05\n" in text
    assert "| auto | 5.00 | 16.50 | 21.50 | 250 / 224 | – | 0.58 | 0.0025 | 31.7 | – |" in text
    assert "| flex | 10.00 | 16.50 | 26.50 |" in text
    row = (
        "| art | 2 | 196,818 | spread | gather | peer | auto | 5.00 | 16.50 | 21.50 | 250 / 224 | 0.31 | 120.5 | 0.97 |"
    )
    assert row in text and text.count("### Several GPUs") == 1 and "| ring | peer | auto |" in text


def test_attention_measured_again_without_flat_methods_keeps_its_row_beside_them():
    figures = {"bench": "attention", "gpus": 1, "workload": "toy", "tokens": 9, "pair_ratio": 2.0, "max_err": 0.002}
    figures |= {"fwd_ms": 1.0, "bwd_ms": 2.0, "tflops_fwd": 5.0, "tflops_bwd": 5.0, "peak_gib": 1.0}

    def run(commit, **rows):
        made = [{"method": name, "vs_flat": flat, "vs_best": rival} for name, (flat, rival) in rows.items()]
        ours = {"auto": 3.0, "cudnn": 3.0}  # predicted times
        return [figures | row | STAMPED | {"commit": commit, "predicted_ms": ours.get(row["method"])} for row in made]

    old = run("a", auto=(None, 0.9), flex=(None, 1.0))
    whole = run("b", auto=(4.0, 0.95), flex=(2.0, 1.9), cudnn_raw=(3.8, 1.0), cudnn=(0.3, 14.503), flat_fa4=(1.0, 3.8))
    text = page(old + whole + run("c", flex=(None, 1.0), auto=(None, 1.0)))
    shown = [line.split(" | ") for line in text.splitlines() if line.startswith(("| auto", "| flex", "| cudnn"))]
    assert {(row[0][2:], row[5], row[6]) for row in shown} == {
        ("auto, beside flat", "4", "0.95 (cudnn_raw)"),
        ("flex, beside flat", "2", "1.9 (cudnn_raw)"),
        ("cudnn_raw", "3.8", "1"),
        ("cudnn", "0.3", "14.5 (cudnn_raw)"),
        ("auto", "–", "1 (flex)"),
        ("flex", "–", "1"),
    }


def test_gdn_times_name_what_counts_and_what_does_not():
    right = {"bench": "gdn", "workload": "toy", "method": "tree", "tokens": 5000, "partial": 1.0512, "fwd_ms": 1.0}
    right |= {"bwd_ms": 3.0, "vs_many": 1.05, "vs_flat": 6.5, "max_err": 0.004, "segment_err": 0.01, "peak_gib": 2.0}
    right |= {"right": True, "timing_only": False, "stages": {"fwd": {"states": [0.75, 0.25], "rest": [0.25, 0.0]}}}
    timed = right | {"method": "fla_flat", "timing_only": True, "vs_flat": None, "stages": {}}
    wrong = right | {"method": "flat", "right": False, "vs_many": None, "vs_flat": None, "stages": {}}
    text = page([record | STAMPED for record in (right, timed, wrong)])
    assert "| toy | tree | 5,000 | 1.051 | 1.00 | 3.00 | 1.05 | 6.5 | 0.004, 0.01 | 2.0 |" in text
    assert "| toy | fla_flat, timing only | 5,000 | 1.051 | 1.00 | 3.00 | 1.05 | – |" in text
    assert "| toy | flat, values wrong | 5,000 | 1.051 | 1.00 | 3.00 | – | – |" in text
    assert "| toy | tree | fwd | states | 0.750 | 75% | 0.250 |" in text


def test_steps_have_a_table_of_one_gpu_one_of_several_and_one_of_layers():
    about = {"bench": "step", "model": "m, 12 layers", "weights": "LoRA 16", "workload": "toy", "gpus": 1}
    about |= {"recompute": "layers, 5 of 12 layers"}
    one = about | {"tree_ms": 2000.0, "flat_ms": 9000.0, "flat_attention": "fa4", "speedup": 4.5, "flop_ratio": 4.6}
    one |= {"speedup_over_flop_ratio": 0.978, "token_ratio": 4.4, "pair_ratio": 2.6, "mfu": 0.46, "hfu": 0.6}
    one |= {"flat_mfu": 0.45, "flat_hfu": 0.61, "tree_gib": 55.5, "flat_gib": 70.2, "loss_error": 1e-6}
    one |= {"norm_error": 1e-3, "gradient_error": 0.012, "same_micro_batch": {"rollouts": 8, "tree_gib": 20.5}}
    one["same_micro_batch"]["flat_gib"] = 70.2
    wrong = one | {
        "workload": "bad",
        "speedup": None,
        "speedup_over_flop_ratio": None,
        "largest": {"tree": 64, "flat": 8},
    }
    two = about | {"gpus": 2, "engine": "plain", "exchange": "gather", "tree_tokens": 140000, "tree_ms": 2100.0}
    two |= {"one_gpu_ms": 2000.0, "tokens_per_s_gpu": 35000, "one_gpu_tokens_per_s": 37000, "efficiency": 0.946}
    two |= {"more": "rollouts", "mfu": 0.44, "one_gpu_mfu": 0.46, "hfu": 0.58, "tree_gib": 60.0, "one_gpu_gib": 55.5}
    layer = {"bench": "step-layer", "model": "m", "workload": "toy", "gpus": 1, "tree_ms": 50.0, "tree_gib": 9.5}
    layer |= {"flat_ms": {"fa2": 220.0, "fa4": 190.0}, "flat_gib": {"fa2": 30.0, "fa4": 29.0}, "gain_over_fa2": 4.4}
    layer |= {"gain_over_fastest": 3.8, "flop_ratio": 4.2, "published_gain": 4.28, "mfu": 0.55, "error": {"fa2": 0.004}}
    # What is recomputed is a part of the case: the same step without stands beside it.
    text = page([record | STAMPED for record in (one, one | {"recompute": "none"}, wrong, two, layer)])
    assert "| toy | none | 2,000 |" in text
    figures = "46.0% | 60.0% | 45.0% | 61.0% | 55.5 | 70.2 | 20.5 / 70.2 (8 rollouts)"
    row = (
        "| m, 12 layers | LoRA 16 | {} | layers, 5 of 12 layers | 2,000 | 9,000 (fa4) | {} | 4.4 | 2.6 | "
        + figures
        + " | {} | 1e-06, 0.001, 0.012 |"
    )
    assert row.format("toy", "4.5 | 4.6 | 0.978", "–") in text and row.format("bad", "– | 4.6 | –", "64 / 8") in text
    figures = "| toy | rollouts | layers, 5 of 12 layers | 2 | plain | gather | 140,000 | 2100 | 2000 |"
    assert f"{figures} 35,000 | 37,000 | 0.946 | 0.44 | 0.46 | 0.58 | 60 | 55.5 |" in text
    assert "| toy | 50 | 9.5 | fa2 220, fa4 190 | fa2 30, fa4 29 | 4.4 | 3.8 | 4.2 | 4.28 | 0.55 | 0.004 |" in text


def test_the_games_seeds_are_rows_of_their_own():
    run = {"bench": "game", "workload": "level 1", "model": "tiny", "P": 1, "steps": 8, "start": 0.0, "end": 0.75}
    run |= {"rewards": [0.1, 0.3, 0.5, 0.7, 0.8, 0.8, 0.8, 1.0], "flat_over_tree": 3.456, "sampler_gap": 2e-6}
    run |= {"seconds": 200.4, "cpu_seconds": 60.2}
    text = page([run | {"seed": seed} | STAMPED for seed in (0, 1)])
    row = "| 8 | 0.000 | 0.750 | 0.750 | 0.20, 0.60, 0.80, 0.90 | 3.46 | 2.0e-06 | 200 | 60 |"
    assert f"| 1 | tiny | 0 | 1 {row}" in text and f"| 1 | tiny | 1 | 1 {row}" in text
