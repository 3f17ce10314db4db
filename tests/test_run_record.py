"""What a resumed run is compared with."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cp_engine.config import parse_config
from cp_engine.rollouts import read_rollouts
from cp_engine.run_record import described, differences, how_it_is_trained, what_is_trained

SAMPLE = Path(__file__).parent.parent / "launch" / "data" / "sample.jsonl"
BASE = {
    "model": {"path": "tiny-qwen3"},
    "data": {"rollouts": "a.jsonl", "groups_per_step": 2},
    "loss": {"name": "grpo"},
    "optimizer": {"lr": 1e-3},
    "steps": 4,
}


def record(sections: dict, rollouts: str | None = "9 rollouts") -> tuple[dict, dict]:
    config = parse_config({name: {**BASE[name], **value} if isinstance(value, dict) and name in BASE else value
                           for name, value in (BASE | sections).items()})  # fmt: skip
    return what_is_trained(config, rollouts), how_it_is_trained(config)


def changed(before: dict, after: dict) -> tuple[list[str], list[str]]:
    """What makes another run, and what is told only."""
    return tuple(list(differences(then, now)) for then, now in zip(record(before), record(after), strict=True))


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ({"data": {"groups_per_step": 3}}, "data.groups_per_step was 2 and is 3"),
        ({"data": {"limit": 5}}, "data.limit was None and is 5"),
        ({"loss": {"name": "sft"}}, "loss.name was 'grpo' and is 'sft'"),
        ({"loss": {"kl_coef": 0.1, "kl_estimator": "k1"}}, "loss.kl_coef was 0.0 and is 0.1"),
        ({"loss": {"temperature": 0.5}}, "loss.temperature was 1.0 and is 0.5"),
        ({"optimizer": {"name": "sgd"}}, "optimizer.name was 'adamw' and is 'sgd'"),
        ({"lora": {"r": 4}}, "lora was None and is {'r': 4"),
        ({"seed": 3}, "seed was 0 and is 3"),
    ],
    ids=str,
)
def test_other_data_losses_and_models_make_another_run(after, told):
    found, _ = changed({}, after)
    assert found[0].startswith(told) and len(found) == (2 if "kl_coef" in told else 1)


def test_what_may_change_is_told_and_what_does_not_matter_is_not():
    hyper = {"lr": 1e-4, "weight_decay": 0.1}
    assert changed({}, {"optimizer": hyper, "dtype": "bfloat16"}) == (
        [],
        [
            "optimizer.lr was 0.001 and is 0.0001",
            "optimizer.weight_decay was 0.0 and is 0.1",
            "dtype was 'float32' and is 'bfloat16'",
        ],
    )
    linear = {"optimizer": {"schedule": "linear"}}
    assert changed(linear, linear | {"steps": 8}) == ([], ["steps was 4 and is 8"])
    assert changed({}, linear) == ([], ["optimizer.schedule was 'constant' and is 'linear'"])
    others = {"parallel": {"dp": 2, "cp": 2}, "engine": {"name": "fsdp2"}, "packing": {"max_pack_tokens": 99}}
    others |= {"data": {"rollouts": "moved.jsonl"}, "optimizer": {"on_nonfinite": "skip"}, "steps": 8}
    assert changed({}, others) == ([], [])


def test_rollouts_are_told_apart_by_contents_and_order():
    rollouts = read_rollouts(SAMPLE, limit=4)
    told = described(rollouts)
    assert told.startswith("4 rollouts with digest ") and told == described(read_rollouts(SAMPLE, limit=4))
    ids = rollouts[0].input_ids.copy()
    ids[-1] ^= 1
    others = [
        rollouts[::-1],
        rollouts[:3],
        [replace(rollouts[0], input_ids=ids), *rollouts[1:]],
        [replace(rollouts[0], reward=9.0), *rollouts[1:]],
        [replace(rollouts[0], old_logprobs=np.full(len(ids), -1.0)), *rollouts[1:]],
        [replace(rollouts[0], loss_mask=~rollouts[0].loss_mask), *rollouts[1:]],
    ]
    assert len({told, *map(described, others)}) == 7
    (data,) = differences(record({}, told)[0], record({}, described(rollouts[:3]))[0])
    assert data.startswith(f"data.rollouts was '{told}' and is '3 rollouts with digest ")
