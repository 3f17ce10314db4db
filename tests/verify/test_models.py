"""`verify` of the models that `test_verify` leaves out: cut packs, one to three ranks, float64 and float32."""

from dataclasses import replace
from unittest import mock

import pytest

from cp_engine import placement
from cp_engine.verify.run import VerifyOptions, run_flat, verify_tree
from tests.verify.test_verify import on_ranks, sample, this_rank

MODELS = ("tiny-llama", "tiny-qwen3-window", "tiny-qwen3-moe", "tiny-qwen3.5-moe", "tiny-qwen3-next")
CASES = (
    {"dtype": "float64", "exchange": "ring"},
    {"dtype": "float32", "exchange": "gather"},
)


def verify_cases(model: str, cases: tuple[dict, ...]) -> list[dict]:
    ranks, results = this_rank(), []
    for case in cases:
        options = VerifyOptions(model=model, loss="grpo", max_pack_tokens=130, **case)
        results.append(verify_tree(run_flat(sample(8), options, ranks), options, ranks))
    return results


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_tree_equals_flat_rows(model, world):
    cases = CASES if world == 1 else CASES[:1]
    for case, result in zip(cases, on_ranks(world, verify_cases, model, cases), strict=True):
        assert result["ok"], (case, result["reasons"])
        assert result["bound"] == {"float64": 1e-10, "float32": 2e-5}[case["dtype"]]
        assert result["packs"] > 1


def verify_windows(exchange: str, off_by_one: bool) -> dict:
    plan = placement.shard_plan

    def wider(*arguments, window: int, **named):
        return plan(*arguments, window=window + off_by_one, **named)

    options = VerifyOptions(model="tiny-qwen3-window", loss="grpo", exchange=exchange)
    flat = run_flat(sample(8), options, this_rank())
    with mock.patch.object(placement, "shard_plan", wider):
        return verify_tree(flat, replace(options, layout="contiguous"), this_rank())


@pytest.mark.parametrize(("world", "exchange"), [(3, "gather"), (2, "ulysses")])
def test_windows_cross_ranks_and_one_token_more_shows(world, exchange):
    for off_by_one in (False, True):
        result = on_ranks(world, verify_windows, exchange, off_by_one)
        assert result["ok"] != off_by_one, result["reasons"]
        assert not off_by_one or result["max_logprob_err"] > 1e-3
