"""The figures of `plan`, against closed forms and brute force."""

from __future__ import annotations

import argparse
import json

import pytest

from cp_engine.cli.plan import add_arguments, plan_report, run
from cp_engine.rollouts import flatten_rollouts
from cp_engine.sharding.layout import contiguous_layout
from tests.forests import CLOSED_FORM_ROWS, random_variety


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


def reported(capsys, *arguments: str) -> dict:
    assert plan(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_closed_form(tmp_path, capsys):
    report = reported(capsys, "--rollouts", closed_form_file(tmp_path), "--cp", "2")
    assert report.pop("plan_ms") > 0
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
    report = plan_report(flatten_rollouts(rows.rollouts()), 1 + seed % 5, rows.share, None)
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


def test_a_table_is_printed_for_people(tmp_path, capsys):
    assert plan("--rollouts", closed_form_file(tmp_path), "--cp", "2") == 0
    text = capsys.readouterr().out
    assert "tree_tokens_per_group" in text and "pack 0: 9 tree tokens" in text and "rows_out" in text


def test_wrong_arguments_are_refused(tmp_path, capsys):
    path = closed_form_file(tmp_path)
    with pytest.raises(SystemExit):
        plan("--rollouts", path, "--cp", "0")
    assert "argument --cp: expected at least 1, got 0" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"line 1: field input_ids: expected at most 4 tokens, the pack budget"):
        plan("--rollouts", path, "--cp", "2", "--max-pack-tokens", "4")
