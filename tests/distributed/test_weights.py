"""Weights after optimizer steps, whoever holds them: those of flat rows; checkpoints that go on elsewhere; exports."""

import json

import pytest
import torch

from cp_engine import checkpoint
from cp_engine.checkpoint import Checkpoints
from cp_engine.engine import Engine
from cp_engine.models.load import load_model
from cp_engine.models.precision import keep_float64
from tests.distributed.engine_cases import sample, this_rank, tiny_config, weights_of
from tests.distributed.flat_training import OPTIMIZER, STEPS, scored_sample, train_flat
from tests.distributed.two_steps import largest_error
from tests.ranks import run_ranks

ADAM = {"optimizer": OPTIMIZER, "steps": STEPS}
OBJECTIVES = {
    "grpo": {"aggregation": "seq-mean-token-mean", "kl_coef": 0.05, "entropy_coef": 0.01, "temperature": 0.8},
    "gspo": {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.2, "kl_estimator": "k2"},  # one ratio a rollout
}


def trained(steps: int, sections: dict, rollouts, place=None, resume=False):
    """Loss, learning rate, gradient norm and shares of clipped tokens of each step, and the weights after them; a
    checkpoint in the middle of them."""
    ranks = this_rank()
    with keep_float64():
        engine = Engine(tiny_config(sections), ranks)
        checkpoints = None if place is None else Checkpoints(place, 2)
        if resume:
            assert checkpoints.resume(engine)
        figures = []
        while engine.steps_done < steps:
            metrics = engine.train_step(rollouts)
            figures.append([metrics[key] for key in ("loss", "lr", "grad_norm", "clipped_high", "clipped_low")])
            if place is not None and not resume and engine.steps_done in (2, 5):
                checkpoints.save(engine)
        return figures, weights_of(engine)


def mesh(dp: int, cp: int, **engine) -> dict:
    return {"parallel": {"dp": dp, "cp": cp}, "engine": engine or {"name": "plain"}}


def objective(name: str) -> dict:
    return ADAM | {"loss": {"name": name} | OBJECTIVES[name]}


@pytest.fixture(scope="module")
def flat():
    """By objective: rollouts, and what training the unmodified model on their rows gives."""
    made = {}
    for name in OBJECTIVES:
        config = tiny_config(objective(name))
        rollouts = scored_sample(config)
        made[name] = rollouts, *train_flat(config, rollouts)
    return made


def assert_equal_steps(figures, truth):
    for (loss, lr, norm, *_), (true_loss, true_lr, true_norm) in zip(figures, truth, strict=True):
        assert loss == pytest.approx(true_loss, rel=1e-9)
        assert lr == pytest.approx(true_lr, rel=1e-14)
        assert norm == pytest.approx(true_norm, rel=1e-9)


@pytest.mark.parametrize(
    ("loss", "dp", "cp", "engine"),
    [
        ("grpo", 1, 1, {"name": "plain"}),
        ("grpo", 2, 2, {"name": "fsdp2"}),
        ("grpo", 1, 2, {"name": "plain"}),
        ("grpo", 2, 1, {"name": "fsdp2", "offload": "cpu"}),
        ("gspo", 2, 1, {"name": "plain"}),
        ("gspo", 1, 2, {"name": "fsdp2"}),
    ],
    ids=str,
)
def test_ten_adamw_steps_end_at_the_weights_of_flat_rows(flat, loss, dp, cp, engine):
    """On packs that were cut."""
    rollouts, true_figures, true_weights = flat[loss]
    figures, weights = run_ranks(dp * cp, trained, STEPS, objective(loss) | mesh(dp, cp, **engine), rollouts)[0]
    assert largest_error(weights, true_weights) < 1e-9
    assert_equal_steps(figures, true_figures)
    # Every step's gradients are scaled down; from the second on, some but not all ratios are clipped on either side.
    assert all(norm > OPTIMIZER["max_grad_norm"] for _, _, norm, *_ in figures)
    assert all(0 < high < 0.9 and 0 < low < 0.9 for *_, high, low in figures[1:])


@pytest.mark.parametrize("fault", [{"weight_decay": 0.0}, {"max_grad_norm": None}], ids=str)
def test_another_optimizer_is_seen(flat, fault):
    rollouts, _, true_weights = flat["grpo"]
    sections = objective("grpo") | {"optimizer": OPTIMIZER | fault}
    assert largest_error(trained(STEPS, sections, rollouts)[1], true_weights) > 1e-6


def test_a_checkpoint_goes_on_with_another_engine_and_mesh(flat, tmp_path):
    rollouts, true_figures, true_weights = flat["grpo"]
    run_ranks(4, trained, 5, objective("grpo") | mesh(2, 2, name="fsdp2"), rollouts, tmp_path)
    for world, sections in ((2, mesh(1, 2, name="fsdp2")), (2, mesh(2, 1))):
        figures, weights = run_ranks(world, trained, STEPS, objective("grpo") | sections, rollouts, tmp_path, True)[0]
        assert_equal_steps(figures, true_figures[5:])
        assert largest_error(weights, true_weights) < 1e-9


def test_a_checkpoint_after_skipped_steps_alone_can_be_read(tmp_path):
    sections = ADAM | mesh(1, 1)
    sections["optimizer"] = sections["optimizer"] | {"on_nonfinite": "skip"}
    engine = Engine(tiny_config(sections), this_rank())
    backward = engine.distributed.backward
    engine.distributed.backward = lambda loss, last: backward(loss * float("nan"), last)
    assert engine.train_step(sample())["skipped"]
    engine.distributed.backward = backward
    Checkpoints(tmp_path, 2).save(engine)
    other = Engine(tiny_config(sections), this_rank())
    assert Checkpoints(tmp_path, 2).resume(other) and other.steps_done == 1
    assert other.train_step(sample())["loss"] == engine.train_step(sample())["loss"]
    assert largest_error(weights_of(other), weights_of(engine)) == 0.0


def test_only_complete_checkpoints_of_the_same_run_are_used(tmp_path):
    engine = Engine(tiny_config(ADAM | mesh(1, 1)), this_rank())
    checkpoints = Checkpoints(tmp_path, 2)
    assert not checkpoints.resume(engine)
    for steps in (1, 2, 3):
        engine.steps_done = steps
        checkpoints.save(engine)
    (tmp_path / ".step-00000009.partial").mkdir()
    (tmp_path / "step-00000008").mkdir()  # nothing in it
    assert [path.name for path in checkpoints.complete()] == ["step-00000002", "step-00000003"]
    other = Engine(tiny_config(ADAM | mesh(1, 1) | {"seed": 7}), this_rank())
    with pytest.raises(ValueError, match="is of another run: seed was 0 and is 7; choose another output_dir"):
        checkpoints.resume(other)
    assert other.steps_done == 0


def test_a_failed_write_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    engine = Engine(tiny_config(ADAM | mesh(1, 1)), this_rank())
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(engine)

    def full_disk(*given):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "save_tensors", full_disk)
    engine.steps_done = 1
    with pytest.raises(OSError, match="no space left"):
        checkpoints.save(engine)
    assert [path.name for path in checkpoints.complete()] == ["step-00000000"]


def saved(sections: dict, out) -> dict[str, torch.Tensor]:
    engine = Engine(tiny_config(sections), this_rank())
    engine.save(out)
    return weights_of(engine)


def test_a_sharded_model_is_saved_whole(tmp_path):
    weights = run_ranks(2, saved, mesh(2, 1, name="fsdp2"), tmp_path / "out")[1]
    model = load_model(tmp_path / "out", torch.float64)
    assert largest_error(dict(model.named_parameters()), weights) == 0.0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["Qwen3_5ForCausalLM"]
