"""What one optimizer step is given: whole groups in a fair order, and rollouts that its loss can use."""

import re
from collections import Counter

import numpy as np
import pytest

from cp_engine.cli.train import check_steps, steps_of_groups
from cp_engine.config import LossConfig, PackingConfig, parse_config
from cp_engine.rollouts import Rollout
from cp_engine.step import prepare_step


def rollout(name: str, group: str = "g", **fields) -> Rollout:
    return Rollout(**({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "group": group, "rollout": name} | fields))


def steps(groups: int, per_step: int | None, count: int) -> list[list[str]]:
    rollouts = [rollout(str(r), group=str(g)) for r in range(2) for g in range(groups)]
    raw = {"model": {"path": "x"}, "data": {"rollouts": "f", "groups_per_step": per_step}, "steps": count}
    return [[r.group for r in step] for step in steps_of_groups(rollouts, parse_config(raw))]


@pytest.mark.parametrize(("groups", "per_step"), [(3, 2), (5, 3), (4, 4), (4, None), (7, 5), (1, 1)])
def test_a_step_has_whole_groups_once_each_and_a_pass_has_all(groups, per_step):
    size = per_step or groups
    found = steps(groups, per_step, 4 * groups)
    assert all(Counter(step) == dict.fromkeys(step, 2) and len(step) == 2 * size for step in found)
    order = [group for step in found for group in step[::2]]
    for start in range(0, len(order), groups):
        assert len(set(order[start : start + groups])) == len(order[start : start + groups])


def test_more_groups_than_there_are_is_refused():
    with pytest.raises(ValueError, match="data.groups_per_step is 3, but the rollouts have 2 groups"):
        steps(2, 3, 1)


def test_a_run_whose_advantages_are_all_0_is_refused():
    def check(rewards: str, groups: str, advantage: float | None = None, **loss) -> None:
        given = [(g, {"reward": float(r), "advantage": advantage}) for g, r in zip(groups, rewards, strict=True)]
        rollouts = [rollout(str(number), group=g, **fields) for number, (g, fields) in enumerate(given)]
        raw = {"model": {"path": "x"}, "data": {"rollouts": "f.jsonl"}, "loss": loss}
        check_steps(rollouts, parse_config(raw))

    for rewards, groups in (("0101", "abcd"), ("0011", "aabb")):  # a group each; rewards that are equal in each group
        with pytest.raises(ValueError, match=f"every advantage of f.jsonl is 0, .* none of the {len(set(groups))} gro"):
            check(rewards, groups, name="dr_grpo")
    check("0010", "aabb")
    check("0101", "abcd", advantage=-0.5)
    check("0101", "abcd", name="sft")
    check("0101", "abcd", entropy_coef=0.01)
    with pytest.raises(ValueError, match="every advantage"):
        check("0101", "abcd", advantage=0.0)


def test_what_a_later_step_could_not_use_is_refused_before_the_first():
    def check(rollouts: list[Rollout], per_step: int, **loss) -> None:
        data = {"rollouts": "f.jsonl", "groups_per_step": per_step}
        check_steps(rollouts, parse_config({"model": {"path": "x"}, "data": data, "loss": loss, "steps": 9}))

    good = [rollout(name, group=name, advantage=1.0) for name in "ab"]
    masked = rollout("c", group="c", reward=1.0, loss_mask=[1, 0, 0])
    check([*good, masked], 2)
    with pytest.raises(
        ValueError, match="step [123] would have no trained token .* in its groups 'c': leave such groups"
    ):
        check([*good, masked], 1)
    with pytest.raises(ValueError, match="data.groups_per_step is 3, but the rollouts have 2 groups"):
        check(good, 3)
    with pytest.raises(ValueError, match="1 have neither, the first is rollout 'd'"):
        check([*good, rollout("d", group="d")], 1)
    with pytest.raises(
        ValueError, match="needs ref_logprobs; rollout 'a' .*; `python -m cp_engine logprobs --field ref_l"
    ):
        check(good, 1, kl_coef=0.1)
    with pytest.raises(ValueError, match="dpo needs two rollouts in each group"):
        check(good, 1, name="dpo")


def prepared(rollouts: list[Rollout], **loss):
    return prepare_step(rollouts, PackingConfig(), LossConfig(**loss))


@pytest.mark.parametrize(
    ("fields", "loss", "message"),
    [
        ({}, {}, "grpo needs a reward or an advantage for every rollout; 1 have neither, the first is rollout 'bad'"),
        (
            {"reward": 1.0},
            {"kl_coef": 0.1},
            "loss.kl_coef is set, so every trained token needs ref_logprobs; rollout 'bad' of group 'g' has none at "
            "position 1",
        ),
        (
            {"reward": 1.0, "ref_logprobs": [None, -1.0, None]},
            {"kl_coef": 0.1},
            "rollout 'bad' of group 'g' has none at position 2",
        ),
        (
            {"reward": 1.0},
            {"sampler_cap": 2.0},
            "loss.sampler_cap is set, so every trained token needs sampler_logprobs; rollout 'bad'",
        ),
    ],
)
def test_a_rollout_that_the_loss_cannot_use_is_named(fields, loss, message):
    given = [None, -1.0, -1.0]
    good = rollout("good", reward=0.0, ref_logprobs=given, sampler_logprobs=given)
    with pytest.raises(ValueError, match=re.escape(message)):
        prepared([good, rollout("bad", **fields)], **loss)
    prepared([good, rollout("bad", **fields)], name="sft")


def test_a_step_without_a_trained_token_is_refused():
    with pytest.raises(ValueError, match="no rollout of the step has a trained token"):
        prepared([rollout("r", loss_mask=[1, 0, 0])], name="sft")


def test_given_advantages_stand_beside_normalised_rewards():
    """A rollout with its own advantage stays out of its group's mean and deviation."""
    step = prepared(
        [
            rollout("a", reward=1.0),
            rollout("b", reward=3.0),
            rollout("c", reward=100.0, advantage=0.25),
            rollout("d", advantage=[9.0, -1.0, 2.0]),
        ]
    )
    own = 1 / (2**0.5 + 1e-6)
    expected = [[-own] * 3, [own] * 3, [0.25] * 3, [9.0, -1.0, 2.0]]
    np.testing.assert_allclose(step.advantage.reshape(4, 3), expected, rtol=1e-14)


def test_dr_grpo_does_not_divide_by_the_deviation():
    step = prepared([rollout("a", reward=1.0), rollout("b", reward=3.0)], name="dr_grpo")
    assert step.advantage.tolist() == [-1.0] * 3 + [1.0] * 3
    # seq-mean-token-sum-norm: two rollouts, at most two trained tokens.
    assert step.weight.tolist() == [0.25, 0.25]
    step = prepared([rollout("a", reward=1.0), rollout("b", reward=3.0)], name="dr_grpo", sum_norm=8)
    assert step.weight.tolist() == [1 / 16, 1 / 16]


def test_overlong_rollouts_weigh_nothing_but_stay_in_their_groups_statistics():
    long = rollout("long", reward=0.0, input_ids=[1, 2, 3, 4], loss_mask=[0, 1, 1, 1])
    step = prepared([rollout("a", reward=2.0), rollout("b", reward=1.0), long], name="dapo", overlong_tokens=4)
    assert step.weight.tolist() == [0.25, 0.25, 0.0]
    assert step.advantage[0] == pytest.approx(1 / (1 + 1e-6)) and step.advantage[3] == 0
    assert step.trains
    step = prepared([long], name="dapo", overlong_tokens=4)
    assert step.weight.tolist() == [0.0] and not step.trains


def pair(group: str, first: float | None, second: float | None, **fields) -> list[Rollout]:
    logprobs = {"ref_logprobs": [None, -1.0, -1.0]}
    return [
        rollout("1", group, reward=first, **logprobs, **fields),
        rollout("2", group, reward=second, input_ids=[1, 4, 5], **logprobs),
    ]


def test_dpo_prefers_the_higher_reward_and_keeps_pairs_in_one_pack():
    (g1, g2), (h1, h2) = pair("g", 0.0, 1.0), pair("h", 3.0, 2.0)
    rollouts = [g1, h1, g2, h2]
    step = prepare_step(rollouts, PackingConfig(max_pack_tokens=5), LossConfig(name="dpo"))
    assert step.preference.tolist() == [-1.0, 1.0, 1.0, -1.0]
    assert step.weight.tolist() == [1 / 8] * 4
    for pack in step.packs:
        assert {0, 2} <= set(pack.rollouts.tolist()) or {1, 3} <= set(pack.rollouts.tolist())


@pytest.mark.parametrize(
    ("rollouts", "message"),
    [
        ([rollout("only", reward=1.0)], "dpo needs two rollouts in each group of a step; group 'g' has 1"),
        (pair("g", 1.0, 1.0), "the two of a group need different rewards; group 'g' has 1.0 and 1.0"),
        (pair("g", 1.0, None), "the two of a group need different rewards; group 'g' has 1.0 and None"),
        (pair("g", 1.0, 0.0, loss_mask=[1, 0, 0]), "dpo compares trained tokens; a rollout of group 'g' has none"),
        (
            [rollout("1", reward=1.0), rollout("2", reward=0.0)],
            "loss.name is dpo, so every trained token needs ref_logprobs; rollout '1' of group 'g' has none",
        ),
    ],
)
def test_what_is_no_pair_is_refused(rollouts, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        prepared(rollouts, name="dpo")
