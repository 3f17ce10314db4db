"""The figures of `plan`, against closed forms and brute force."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cp_engine.cli.plan import add_arguments, run
from cp_engine.machines import MACHINES
from cp_engine.model_sizes import model_sizes
from cp_engine.plan_memory import fullest_rank
from cp_engine.plan_report import PlanSettings, plan_packs, plan_report
from cp_engine.rollouts import flatten_rollouts
from cp_engine.scaling import synthetic_rollouts
from cp_engine.sharding.layout import contiguous_layout
from cp_engine.sharding.plan import shard_plan
from tests.forests import CLOSED_FORM_ROWS, random_rows, random_variety


def closed_form_file(tmp_path) -> str:
    path = tmp_path / "rollouts.jsonl"
    with open(path, "w") as out:
        for index, row in enumerate(CLOSED_FORM_ROWS):
            record = {"input_ids": row, "loss_mask": [1] * len(row), "group": index % 2, "rollout": index}
            out.write(json.dumps(record) + "\n")
    return str(path)


def plan(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def settings(cp: int, **changed) -> PlanSettings:
    model = model_sizes(changed.pop("model", "qwen3-8b"))
    return PlanSettings(cp=cp, model=model, machine=MACHINES["h200"], **changed)


def reported(capsys, *arguments: str) -> dict:
    assert plan(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_closed_form(tmp_path, capsys):
    report = reported(capsys, "--rollouts", closed_form_file(tmp_path), "--cp", "2", "--layout", "contiguous")
    assert report.pop("plan_ms") > 0
    assert report.pop("predicted")["layout"] == "contiguous"
    for name in ("layout_method", "exchange", "exchange_reason", "predicted"):
        assert report["packs"][0].pop(name)
    assert report == {
        "rollouts": 6,
        "groups": 2,
        "flat_tokens": 23,
        "tree_tokens": 9,
        # 11 12 13 14 15 | 11 12 31 share 2 in the even group; three rows of the odd one share 11 12 13 14
        "tree_tokens_per_group": 6 + 8,
        "share_key_tokens": 0,
        "segments": 7,
        "max_depth": 6,
        "flat_pairs": 15 + 21 + 6 + 15 + 6 + 1,
        "tree_pairs": 30,
        "replayed_tokens": 0,
        "packs": [
            {
                "tree_tokens": 9,
                "replayed_tokens": 0,
                "gdn_layout": None,
                "token_imbalance": pytest.approx(5 / 4.5),
                "pair_imbalance": pytest.approx(20 / 15),
                "ranks": [
                    # 11 12 | 13 | 14 and then 21 22 | 15 | 31 | 41
                    {"tokens": 4, "pairs": 10, "pieces": 1, "fragments": 3, "rows_in": 0, "rows_out": 4},
                    {"tokens": 5, "pairs": 20, "pieces": 1, "fragments": 4, "rows_in": 4, "rows_out": 0},
                ],
            }
        ],
    }


def test_share_group_and_packs(tmp_path, capsys):
    path = closed_form_file(tmp_path)
    report = reported(capsys, "--rollouts", path, "--cp", "3", "--share", "group", "--max-pack-tokens", "8")
    assert report["tree_tokens"] == report["tree_tokens_per_group"] == 14
    assert [pack["tree_tokens"] for pack in report["packs"]] == [6, 8]
    limited = reported(capsys, "--rollouts", path, "--cp", "1", "--limit", "3", "--limit-per-group", "1")
    assert (limited["rollouts"], limited["tree_tokens"]) == (2, 7)


@pytest.mark.parametrize("seed", range(20))
def test_figures_of_the_ranks(seed):
    rows = random_variety(seed)
    asked = settings(1 + seed % 5, share=rows.share, layout="contiguous")
    report, _ = plan_report(flatten_rollouts(rows.rollouts()), asked)
    (pack,) = report["packs"]
    # Packs order groups by their rollouts, whatever their numbers: compare with the forest of the renumbered rows.
    held: dict[int, list] = {}
    for index, (row, group) in enumerate(zip(rows.rows, rows.groups, strict=True)):
        held.setdefault(group, []).append(row if rows.keys is None else list(zip(row, rows.keys[index], strict=True)))
    order = sorted(held, key=lambda group: sorted(held[group]))
    rows = type(rows)(rows.rows, [order.index(g) for g in rows.groups], rows.share, rows.keys)
    layout = contiguous_layout(rows.forest, 1 + seed % 5)
    owned = [layout.rank_tokens(rank).tolist() for rank in range(layout.world)]
    seen = [{k for t in tokens for k in rows.paths[t]} - set(tokens) for tokens in owned]
    assert report["tree_tokens"] == pack["tree_tokens"] == rows.forest.tokens
    assert report["tree_pairs"] == sum(map(len, rows.paths)) == sum(rank["pairs"] for rank in pack["ranks"])
    assert [rank["tokens"] for rank in pack["ranks"]] == [len(tokens) for tokens in owned]
    assert [rank["rows_in"] for rank in pack["ranks"]] == [len(rows_in) for rows_in in seen]
    for tokens, rank in zip(owned, pack["ranks"], strict=True):
        assert rank["rows_out"] == sum(len(rows_in & set(tokens)) for rows_in in seen)
        assert rank["fragments"] == len(set(rows.forest.segment_of[tokens].tolist()))
    keyless = type(rows)(rows.rows, rows.groups, rows.share)
    assert report["share_key_tokens"] == rows.forest.tokens - keyless.forest.tokens
    for name in ("tokens", "pairs"):
        values = [rank[name] for rank in pack["ranks"]]
        assert pack[f"{name[:-1]}_imbalance"] == pytest.approx(max(values) * len(values) / sum(values))


@pytest.mark.parametrize("seed", range(12))
def test_figures_equal_those_of_the_real_plans(seed):
    """All ranks are counted at once; here they are planned one after the other."""
    cp = 1 + seed % 6
    rows = random_rows(seed, rows=20, longest=60)
    flat = flatten_rollouts(rows.rollouts())
    budget = None if seed % 2 else max(int(flat.row_start[-1]) // 3, 120)
    report, planned = plan_report(flat, settings(cp, max_pack_tokens=budget, model="qwen3-next-80b-a3b"))
    for pack, each in zip(report["packs"], planned, strict=True):
        assert pack["tree_tokens"] == each.placement.forest.tokens
        for rank, figures in enumerate(pack["ranks"]):
            layouts = each.placement.layout, None if each.placement.gdn is None else each.placement.gdn.layout
            real = shard_plan(
                each.pack.forest, layouts[0], rank, each.pack.loss_mask, conv_width=4, gdn_layout=layouts[1]
            )
            assert figures == {
                "tokens": real.tokens,
                "pairs": real.attention.pairs,
                "pieces": real.pieces,
                "fragments": real.gdn.fragments,
                "rows_in": real.attention.fetch.rows_in,
                "rows_out": real.attention.fetch.rows_out,
            }


def test_the_prediction_adds_up(tmp_path, capsys):
    path = closed_form_file(tmp_path)
    report = reported(
        capsys, "--rollouts", path, "--cp", "2", "--max-pack-tokens", "6", "--model", "qwen3-next-80b-a3b"
    )
    predicted, packs = report["predicted"], [pack["predicted"] for pack in report["packs"]]
    assert len(packs) > 1
    assert predicted["step_ms"] == pytest.approx(sum(pack["step_ms"] for pack in packs))
    assert predicted["step_ms"] == pytest.approx(predicted["compute_ms"] + predicted["exposed_ms"])
    assert predicted["speedup_over_one_gpu"] == pytest.approx(predicted["one_gpu_ms"] / predicted["step_ms"])
    assert predicted["speedup_over_flat"] == pytest.approx(predicted["flat_ms"] / predicted["step_ms"])
    memory = predicted["memory_gib"]
    assert memory["total"] == pytest.approx(sum(part for name, part in memory.items() if name != "total"))
    for pack in packs:
        layers, times = pack["layers"], {"attention": 12, "gdn": 36, "relay": 12}
        assert pack["step_ms"] == pytest.approx(
            sum(times[kind] * (layer["forward_ms"] + layer["backward_ms"]) for kind, layer in layers.items())
        )
        for layer in layers.values():
            assert layer["forward_ms"] + layer["backward_ms"] == pytest.approx(
                layer["compute_ms"] + layer["exposed_ms"]
            )
    alone = reported(capsys, "--rollouts", path, "--cp", "1")["predicted"]
    assert alone["efficiency"] == 1 and alone["exposed_ms"] == 0


def test_memory_follows_the_number_of_recomputed_layers(capsys):
    given = "--synthetic", "grpo_5k16", "--cp", "8", "--engine", "fsdp2"
    few, many, every = (
        reported(capsys, *given, *more)["predicted"]
        for more in (("--recompute-layers", "6"), ("--recompute-layers", "30"), ())
    )
    assert (few["recompute_layers"], many["recompute_layers"], every["recompute_layers"]) == (6, 30, None)
    assert few["memory_gib"]["activations"] > many["memory_gib"]["activations"] > every["memory_gib"]["activations"]
    plan(*given, "--recompute-layers", "6")
    assert "recompute layers in the first 6" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    for more in (("--recompute-layers", "37"), ("--recompute-layers", "3", "--recompute", "none")):
        with pytest.raises(ValueError, match="--recompute-layers is .* a model of 36 layers: give at most so many"):
            plan(*given, *more)


def test_the_exchange_is_chosen_or_as_asked(tmp_path, capsys):
    path = closed_form_file(tmp_path)
    (pack,) = reported(capsys, "--rollouts", path, "--cp", "2")["packs"]
    steps = pack["predicted"]["by_exchange"]
    assert set(steps) == {"gather", "ring", "ulysses"} and pack["exchange"] == min(steps, key=steps.get)
    for exchange in steps:
        (pack,) = reported(capsys, "--rollouts", path, "--cp", "2", "--exchange", exchange)["packs"]
        assert pack["exchange"] == exchange and pack["predicted"]["step_ms"] == steps[exchange]
    with pytest.raises(ValueError, match=r"--exchange ulysses cannot run: 32 query heads are not divisible by 3 ranks"):
        plan("--rollouts", path, "--cp", "3", "--exchange", "ulysses")
    (pack,) = reported(capsys, "--rollouts", path, "--cp", "3")["packs"]
    assert "not divisible" in pack["predicted"]["refused"]["ulysses"] and "ulysses" in pack["exchange_reason"]


@pytest.mark.parametrize("exchange", ["auto", "gather", "ring", "ulysses"])
def test_one_rank_moves_nothing(exchange, tmp_path, capsys):
    report = reported(capsys, "--rollouts", closed_form_file(tmp_path), "--cp", "1", "--exchange", exchange)
    assert report["packs"][0]["exchange"] == ("gather" if exchange == "auto" else exchange)
    assert report["predicted"]["exposed_ms"] == 0 and report["predicted"]["efficiency"] == 1


def test_auto_takes_no_exchange_that_does_not_fit():
    """A machine whose memory ends between the buffers of the fastest exchange and those of another."""
    flat = flatten_rollouts(random_rows(7, rows=40, longest=400, vocabulary=4).rollouts())
    asked = settings(4)
    (free,) = plan_packs(flat, asked)
    held = {name: each.buffer_bytes for name, each in free.times.items()}
    rest = fullest_rank(free.placement, None, asked.model, asked.memory(4)).peak
    assert held[free.chosen] > min(held.values())
    machine = replace(asked.machine, memory_bytes=rest + held[free.chosen] - 1)
    (tight,) = plan_packs(flat, replace(asked, machine=machine))
    assert tight.chosen != free.chosen and "do not fit" in tight.refused[free.chosen]
    assert f"{free.chosen} cannot run: its buffers" in tight.reason
    # Where nothing fits, the fastest one is shown with the memory that it needs.
    (none,) = plan_packs(flat, replace(asked, machine=replace(asked.machine, memory_bytes=rest)))
    assert none.chosen == free.chosen and not none.refused


def test_hosts_and_devices(tmp_path, capsys):
    path = closed_form_file(tmp_path)

    def predicted(*options):
        return reported(capsys, "--rollouts", path, "--cp", "4", "--exchange", "gather", *options)["predicted"]

    one, two = predicted(), predicted("--nodes", "2", "--gpus-per-node", "2")
    assert (one["nodes"], two["nodes"], two["gpus_per_node"]) == (1, 2, 2)
    assert two["exposed_ms"] > one["exposed_ms"] and two["compute_ms"] == pytest.approx(one["compute_ms"])
    measured = {device: predicted("--device", device)["device_measured"] for device in MACHINES}
    assert measured == {"h200": True, "h100": False, "b200": False}
    assert predicted("--device", "b200")["compute_ms"] < one["compute_ms"] < predicted("--device", "h100")["compute_ms"]
    with pytest.raises(ValueError, match=r"4 context-parallel ranks need 4 GPUs, but --nodes 1 with 3 GPUs each"):
        predicted("--nodes", "1", "--gpus-per-node", "3")


def test_a_table_is_printed_for_people(tmp_path, capsys):
    assert plan("--rollouts", closed_form_file(tmp_path), "--cp", "2") == 0
    text = capsys.readouterr().out
    assert "tree_tokens_per_group" in text and "pack 0: 9 tree tokens" in text and "rows_out" in text
    assert "predicted for qwen3-8b on h200, one host" in text and "against one GPU" in text
    assert plan("--rollouts", closed_form_file(tmp_path), "--cp", "40", "--device", "b200") == 0
    text = capsys.readouterr().out
    assert "largest of 40" in text and "b200, scaled from the H200, 5 hosts of 8" in text


def test_wrong_arguments_are_refused(tmp_path, capsys):
    path = closed_form_file(tmp_path)
    for count in ("0", "two", "-3", "1.5"):
        with pytest.raises(SystemExit):
            plan("--rollouts", path, f"--cp={count}")
        assert f"argument --cp: expected a whole number of at least 1, got '{count}'" in capsys.readouterr().err
    for ranks in (("--cp", "100000"), ("--sweep", "cp=2,100000")):
        with pytest.raises(ValueError, match="4,096 ranks are planned, got 100,000"):
            plan("--rollouts", path, *ranks)
    with pytest.raises(ValueError, match=r"line 1: field input_ids: expected at most 4 tokens, the pack budget"):
        plan("--rollouts", path, "--cp", "2", "--max-pack-tokens", "4")
    with pytest.raises(ValueError, match=r"--limit and --limit-per-group choose rollouts of a file"):
        plan("--synthetic", "grpo_5k16", "--cp", "2", "--limit", "3")
    with pytest.raises(ValueError, match=r"--model expects qwen3-8b, .* got 'qwen9'"):
        plan("--rollouts", path, "--cp", "2", "--model", "qwen9")
    for options in ((), ("--rollouts", path), ("--cp", "2"), ("--rollouts", path, "--cp", "2", "--sweep", "cp=2")):
        with pytest.raises(SystemExit):
            plan(*options)
        assert "error" in capsys.readouterr().err


def test_the_command_imports_no_torch(tmp_path):
    code = (
        "import sys, argparse\nfrom cp_engine.cli.plan import add_arguments, run\nparser = argparse.ArgumentParser()\n"
        "add_arguments(parser)\nrun(parser.parse_args(sys.argv[1:]))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    options = ["--rollouts", closed_form_file(tmp_path), "--cp", "2", "--picture", str(tmp_path / "a.html")]
    subprocess.run([sys.executable, "-c", code, *options], check=True, capture_output=True)


def test_many_ranks_take_seconds():
    """512 ranks on a million tokens: every rank planned after the other would take minutes."""
    flat = synthetic_rollouts("grpo_5k16")
    began = time.process_time()
    report, _ = plan_report(flat, settings(512))
    assert time.process_time() - began < 10  # about 2 on one core of the machine that this was written on
    assert report["tree_tokens"] > 10**6 and len(report["packs"][0]["ranks"]) == 512
    assert sum(rank["tokens"] for rank in report["packs"][0]["ranks"]) == report["tree_tokens"]


def test_a_layout_of_gdn_layers_is_reported(capsys):
    """Rows in and out are those of the real plans, and the moves of all runs are in the step."""
    asked = settings(3, model="qwen3-next-80b-a3b", gdn_layout="own")
    flat = flatten_rollouts(random_rows(3, rows=20, longest=60).rollouts())
    report, (planned,) = plan_report(flat, asked)
    (pack,) = report["packs"]
    found, own = pack["gdn_layout"], planned.placement.gdn
    assert found["own"] and found["method"] == own.method and "layout of their own" in found["reason"]
    for rank in range(3):
        layout, mask = planned.placement.layout, planned.pack.loss_mask
        real = shard_plan(planned.pack.forest, layout, rank, mask, conv_width=4, gdn_layout=own.layout)
        assert found["rows_out"][rank] == real.relayout.send_counts.sum()
        assert found["rows_in"][rank] == real.relayout.recv_counts.sum()
        assert found["tokens"][rank] == own.layout.rank_token_count[rank]
        assert pack["ranks"][rank]["fragments"] == real.gdn.fragments
    layers, predicted = pack["predicted"]["layers"], pack["predicted"]
    total = [layers[name]["forward_ms"] + layers[name]["backward_ms"] for name in ("attention", "gdn", "relay")]
    assert predicted["step_ms"] == pytest.approx(12 * total[0] + 36 * total[1] + 12 * total[2])
    same, _ = plan_report(flat, settings(3, model="qwen3-next-80b-a3b", gdn_layout="same"))
    assert not same["packs"][0]["gdn_layout"]["own"] and "relay" not in same["packs"][0]["predicted"]["layers"]
    path = str(Path(__file__).parents[1] / "launch" / "data" / "sample.jsonl")
    with pytest.raises(ValueError, match="gdn_layout own is for models with GDN layers"):
        plan("--rollouts", path, "--cp", "2", "--gdn-layout", "own", "--model", "qwen3-8b")
    assert plan("--rollouts", path, "--cp", "2", "--gdn-layout", "own", "--model", "qwen3-next-80b-a3b") == 0
    text = capsys.readouterr().out
    assert "GDN layers have a layout of their own" in text and "moving hidden states around one run" in text
