"""The engine as a program uses it: steps that learn, equal on every number of ranks, and ranks that disagree."""

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cp_engine.config import Config
from cp_engine.distributed.ranks import Ranks
from cp_engine.engine import Engine
from cp_engine.models.presets import preset_model
from cp_engine.rollouts import Rollout, read_rollouts
from tests.ranks import run_ranks

SAMPLE = Path(__file__).parent.parent / "launch" / "data" / "sample.jsonl"
METRICS = (
    "step loss grad_norm tree_tokens flat_tokens tree_tokens_per_s flat_tokens_per_s token_imbalance pair_imbalance "
    "seconds"
).split()


def this_rank() -> Ranks:
    if not dist.is_initialized():
        return Ranks(0, 1, None, torch.device("cpu"))
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, torch.device("cpu"))


def config(cp: int, **sections) -> Config:
    raw = {"model": {"path": "tiny-qwen3.5", "vocab_size": 512}, "parallel": {"cp": cp}, "dtype": "float64"}
    return Config.model_validate(raw | {"optimizer": {"lr": 1e-3}} | sections)


def trained(steps: int, sections: dict) -> list[dict]:
    ranks = this_rank()
    engine = Engine(config(ranks.world, **sections), ranks)
    return [engine.train_step(read_rollouts(SAMPLE, limit=20)) for _ in range(steps)]


@pytest.mark.parametrize(
    "sections",
    [{"loss": {"name": "sft"}}, {"loss": {"name": "grpo"}, "packing": {"max_pack_tokens": 120}}],
    ids=["sft", "grpo-packs"],
)
def test_every_number_of_ranks_takes_the_same_steps(sections):
    alone = trained(3, sections)
    assert all(set(METRICS) <= set(step) for step in alone)
    assert [step["step"] for step in alone] == [1, 2, 3]
    assert alone[2]["loss"] < alone[0]["loss"]
    assert alone[0]["flat_tokens"] > alone[0]["tree_tokens"] > 0
    for world in (2, 3):
        ranks = run_ranks(world, trained, 3, sections)
        for step, truth in zip(ranks[0], alone, strict=True):
            # float32 casts inside transformers are the same on both sides but for the order of sums.
            assert step["loss"] == pytest.approx(truth["loss"], rel=1e-5, abs=1e-8)
            assert step["grad_norm"] == pytest.approx(truth["grad_norm"], rel=1e-4)
            assert step["token_imbalance"] >= 1 and step["pair_imbalance"] >= 1
        assert all(step["loss"] == first["loss"] for rank in ranks for step, first in zip(rank, ranks[0], strict=True))


def warnings_of_steps(counts: list[int]) -> list[list[str]]:
    """What the engine warns of in two steps of so many rollouts, on two data-parallel groups."""
    found: list[list[str]] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found[-1].append(record.getMessage())
    logging.getLogger("cp_engine.engine").addHandler(handler)
    for count in counts:
        found.append([])
        engine = Engine(config(1, parallel={"dp": 2}), this_rank())
        for _ in range(2):
            engine.train_step(read_rollouts(SAMPLE, limit=count))
    return found


def test_groups_without_a_pack_are_warned_of_once():
    (enough, too_few), others = run_ranks(2, warnings_of_steps, [2, 1])
    assert enough == [] and others == [[], []]
    (told,) = too_few
    assert told.startswith("a step has 1 packs for 2 data-parallel groups: 1 groups compute nothing. A pack")


def test_rollouts_that_the_model_is_not_made_for_are_warned_of_once(caplog):
    rollouts = read_rollouts(SAMPLE, limit=4)
    longest = max(rollout.length for rollout in rollouts)

    def warned(allowed: int, rope: dict) -> list[str]:
        model = preset_model("tiny-qwen3", torch.float64, 512, seed=0)
        model.config.max_position_embeddings, model.config.rope_parameters = allowed, rope
        engine = Engine(config(1, model={"path": "tiny-qwen3"}), this_rank(), causal_lm=model)
        caplog.clear()
        for _ in range(2):
            engine.logprobs(rollouts)
        return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    yarn = plain | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": longest // 2}
    assert warned(longest, plain) == warned(longest - 1, yarn) == []
    (told,) = warned(longest - 1, plain)
    assert f"more than the {longest - 1} tokens that the model's config allows for" in told


def test_what_a_program_gives_is_checked():
    def refused(match: str, model, **sections):
        with pytest.raises(ValueError, match=match):
            Engine(config(1, model={"path": "tiny-qwen3"}, **sections), this_rank(), causal_lm=model)

    model = preset_model("tiny-qwen3", torch.float32, 512, seed=0)
    refused("have model.embed_tokens.weight in torch.float64, got torch.float32: the configuration's dtype", model)
    refused("in torch.bfloat16, got torch.float32", model, dtype="bfloat16")
    hybrid = preset_model("tiny-qwen3.5", torch.float32, 512, seed=0).bfloat16()
    refused("linear_attn.dt_bias in torch.float32, got torch.bfloat16: .* the decays", hybrid, dtype="bfloat16")
    refused("with its head, .* got a Qwen3Model", model.model)
    refused("in no wrapper .* got a DataParallel", torch.nn.DataParallel(model))
    refused("got a str", "models/Qwen3-8B")
    refused("nothing to train: set it", model.requires_grad_(False), dtype="float32")
    with pytest.raises(ValueError, match="must be a cp_engine.Config, got dict: cp_engine.config.read_config reads"):
        Engine({"model": {"path": "tiny-qwen3"}}, this_rank())


def test_the_group_has_to_fit_the_configuration():
    with pytest.raises(ValueError, match="parallel.cp is 2 but 1 rank processes run: start 2"):
        Engine(config(2), this_rank())


def disagree(kind: str) -> str:
    ranks = this_rank()
    other = kind if ranks.rank == 1 else ""
    try:
        cp, lr = ranks.world + (other == "mesh"), 2e-3 if other == "settings" else 1e-3
        engine = Engine(config(cp, optimizer={"lr": lr}), ranks)
        rollouts = read_rollouts(SAMPLE, limit=4)
        engine.train_step(rollouts[::-1] if other == "rollouts" else rollouts)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "what"), [("settings", "configuration"), ("mesh", "configuration"), ("rollouts", "step")]
)
def test_ranks_that_disagree_fail_together(kind, what):
    for message in run_ranks(2, disagree, kind):
        assert message.startswith(
            f"ranks [1] have another {what} than rank 0: every rank must be given the same rollouts"
        )


def test_rollouts_that_do_not_fit_are_refused_before_the_step():
    engine = Engine(config(1, packing={"max_pack_tokens": 4}), this_rank())
    fields = {"loss_mask": [0, 1], "group": "g", "rollout": "r", "reward": 1.0}
    with pytest.raises(ValueError, match=r"rollouts\[0\].*input_ids: expected ids of the vocabulary, in \[0, 512\)"):
        engine.train_step([Rollout(input_ids=[1, 512], **fields)])
    with pytest.raises(ValueError, match="expected at most 4 tokens, the pack budget"):
        engine.train_step([Rollout(input_ids=[1] * 5, **(fields | {"loss_mask": [1] * 5}))])
    assert engine.steps_done == 0


def test_replaying_short_runs_changes_the_packs_and_not_the_step():
    steps = []
    for chosen in (False, True):
        engine = Engine(config(1, loss={"name": "sft"}, packing={"share_or_replay": chosen}), this_rank())
        steps.append(engine.train_step(read_rollouts(SAMPLE, limit=20)))
    shared, replayed = steps
    assert shared["tree_tokens"] < replayed["tree_tokens"] <= replayed["flat_tokens"]
    assert replayed["loss"] == pytest.approx(shared["loss"], rel=1e-5)
    assert replayed["grad_norm"] == pytest.approx(shared["grad_norm"], rel=1e-4)


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone():
    engine = Engine(config(1, loss={"name": "sft"}), this_rank())
    with torch.no_grad():
        engine.model.causal_lm.lm_head.weight[0, 0] = float("nan")
    before = [p.detach().clone() for p in engine.model.parameters()]
    with pytest.raises(RuntimeError, match="the gradient norm of step 1 is nan; the weights are those from before it"):
        engine.train_step(read_rollouts(SAMPLE, limit=20))
    assert engine.steps_done == 0
    after = engine.model.parameters()
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True))
