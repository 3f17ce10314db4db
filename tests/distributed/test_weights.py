"""Weights after optimizer steps, whoever holds them; checkpoints that go on elsewhere; exports."""

import json

import pytest
import torch

from cp_engine import checkpoint
from cp_engine.checkpoint import Checkpoints
from cp_engine.engine import Engine
from cp_engine.models.load import load_model
from cp_engine.models.precision import keep_float64
from tests.distributed.engine_cases import sample, this_rank, tiny_config
from tests.ranks import run_ranks

ADAM = {"optimizer": {"lr": 1e-3, "weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 2}, "steps": 10}


def weights_of(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in engine.named_full_weights()}


def trained(steps: int, sections: dict, place=None, resume=False):
    """Losses and learning rates of the steps, and the weights after them; a checkpoint in the middle of them."""
    ranks = this_rank()
    with keep_float64():
        engine = Engine(tiny_config(sections), ranks)
        checkpoints = None if place is None else Checkpoints(place, 2)
        if resume:
            assert checkpoints.resume(engine)
        figures = []
        while engine.steps_done < steps:
            metrics = engine.train_step(sample())
            figures.append((metrics["loss"], metrics["lr"]))
            if place is not None and not resume and engine.steps_done in (2, 5):
                checkpoints.save(engine)
        return figures, weights_of(engine)


def mesh(dp: int, cp: int, **engine) -> dict:
    return {"parallel": {"dp": dp, "cp": cp}, "engine": engine or {"name": "plain"}}


def largest_error(found, truth) -> float:
    assert found.keys() == truth.keys()
    return max(float((found[name] - truth[name]).abs().max() / truth[name].abs().max()) for name in truth)


@pytest.fixture(scope="module")
def plain():
    return trained(10, ADAM | mesh(1, 1))


@pytest.mark.parametrize(
    ("dp", "cp", "engine"),
    [(2, 2, {"name": "fsdp2"}), (1, 2, {"name": "plain"}), (2, 1, {"name": "fsdp2", "offload": "cpu"})],
    ids=str,
)
def test_ten_adamw_steps_end_at_the_same_weights(plain, dp, cp, engine):
    figures, weights = run_ranks(dp * cp, trained, 10, ADAM | mesh(dp, cp, **engine))[0]
    assert largest_error(weights, plain[1]) < 1e-9
    for (loss, lr), (true_loss, true_lr) in zip(figures, plain[0], strict=True):
        assert loss == pytest.approx(true_loss, rel=1e-9) and lr == true_lr


def test_a_checkpoint_goes_on_with_another_engine_and_mesh(plain, tmp_path):
    run_ranks(4, trained, 5, ADAM | mesh(2, 2, name="fsdp2"), tmp_path)
    for world, sections in ((2, mesh(1, 2, name="fsdp2")), (2, mesh(2, 1))):
        figures, weights = run_ranks(world, trained, 10, ADAM | sections, tmp_path, True)[0]
        assert [lr for _, lr in figures] == [lr for _, lr in plain[0][5:]]
        assert [loss for loss, _ in figures] == pytest.approx([loss for loss, _ in plain[0][5:]], rel=1e-9)
        assert largest_error(weights, plain[1]) < 1e-9


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
