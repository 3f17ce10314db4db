"""DeepSpeed ZeRO 0 to 3 in float32 against whole weights, with ranks that call the head different numbers of times."""

from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from cp_engine.checkpoint import Checkpoints
from cp_engine.distributed import zero as zero_module
from cp_engine.engine import Engine
from cp_engine.sharding.gdn_plan import GdnPlan
from tests.distributed.engine_cases import sample, this_rank, tiny_config, weights_of
from tests.distributed.test_engines import around_an_overlong_step
from tests.distributed.test_loading import engine_of_first_rank, save_deep_model, whole_model
from tests.distributed.two_steps import BOUND, SGD, assert_close, assert_moved, largest_error, several, two_steps
from tests.ranks import run_ranks
from tests.storages import HostBytes

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (pip install 'cp-engine[deepspeed]')")


def zero_ranks(world: int, fn, *args, **options) -> list:
    """`run_ranks` without DeepSpeed's all-reduce through shared memory, which takes a compiler and half a minute."""
    return run_ranks(world, _uncompiled, fn, *args, **options)


def _uncompiled(fn, *args):
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return fn(*args)


def zero(stage: int) -> dict:
    return {"name": "deepspeed", "stage": stage} | ({"persistence_threshold": 0} if stage == 3 else {})


@pytest.mark.parametrize("mesh", [{"dp": 2, "cp": 1}, {"dp": 1, "cp": 2}], ids=str)
def test_two_steps_are_those_of_plain(mesh):
    engines = [{"name": "plain"}, *map(zero, range(4))]
    cases = [SGD | {"parallel": mesh, "engine": engine} for engine in engines]
    for truth, *others in zero_ranks(2, several, cases):
        assert_moved(truth)
        for found in others:
            assert_close(found, truth)


def with_turns(sections: dict):
    """`two_steps`, and the turns whose states this rank hands on before it computes output gates."""
    turns, exact = set(), GdnPlan.awaited_turn.fget

    def seen(plan: GdnPlan) -> int:
        turns.add(exact(plan))
        return exact(plan)

    with mock.patch.object(GdnPlan, "awaited_turn", property(seen)):
        return two_steps(sections), turns


def test_stage_3_gathers_nothing_where_only_some_ranks_have_exchanged_states():
    spread = SGD | {"parallel": {"cp": 3, "layout": "contiguous", "gdn_layout": "same"}}
    truth = run_ranks(3, two_steps, spread)[0]
    results = zero_ranks(3, with_turns, spread | {"engine": zero(3)}, timeout=120.0)
    assert [turns for _, turns in results] == [{0}, {1}, {0}]
    assert_close(results[0][0], truth)


def differing_at_start(cases: list[dict]) -> list[list[str]]:
    """By case, the weights that are not those that this rank reads for itself, bit by bit."""
    found = []
    for sections in cases:
        engine = engine_of_first_rank(tiny_config(sections | {"parallel": {"cp": this_rank().world}}))
        truth = dict(whole_model(engine.config).named_parameters())
        weights = weights_of(engine)
        assert len(weights) == len(truth)
        found.append([name for name, weight in weights.items() if not torch.equal(weight, truth[name])])
    return found


def test_weights_come_from_the_first_rank():
    offloaded = zero(3) | {"offload": "cpu"}
    cases = [{"dtype": "float32", "engine": engine} for engine in (zero(0), zero(1), zero(3), offloaded)]
    experts = {"model": {"path": "tiny-qwen3-moe", "vocab_size": 36}, "dtype": "bfloat16"}
    cases += [experts | {"engine": zero(stage)} for stage in (2, 3)]
    assert zero_ranks(2, differing_at_start, cases) == [[[]] * len(cases)] * 2


def receiving_bytes(path) -> tuple[int, int, int]:
    """Of stage 3 in float32: most bytes that are held before `initialize`, and of the weights outside of layers and of
    all of them."""
    held, receive = HostBytes(), zero_module._receive

    def counted(*args):
        with held:
            receive(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero_module, "_receive", counted)
        sections = {"model": {"path": str(path)}, "dtype": "float32", "engine": zero(3), "parallel": {"cp": 2}}
        engine = Engine(tiny_config(sections), this_rank())
    sizes = {name: 4 * parameter.ds_numel for name, parameter in engine.distributed.tree.named_parameters()}
    return held.most, sum(size for name, size in sizes.items() if ".layers." not in name), sum(sizes.values())


def test_stage_3_holds_its_part_and_one_layer(tmp_path):
    save_deep_model(tmp_path)
    most, outside, whole = zero_ranks(2, receiving_bytes, tmp_path)[1]
    layers = whole - outside
    assert layers / 2 < most < layers / 2 + 1.2 * layers / 16 + outside < 0.7 * whole


ADAM = {"dtype": "float32", "optimizer": {"lr": 1e-3}}


def first_part(stage: int, place):
    """Two AdamW steps and a checkpoint; then, while it is written, a third step's loss, and the weights after it."""
    engine, checkpoints = _adam_engine(stage), Checkpoints(place, 1, asynchronous=True)
    for _ in range(2):
        engine.train_step(sample())
    checkpoints.save(engine)
    found = engine.train_step(sample())["loss"], weights_of(engine)
    checkpoints.wait()
    return found


def second_part(stage: int, place):
    """The third step from the checkpoint."""
    engine = _adam_engine(stage)
    assert Checkpoints(place, 1).resume(engine)
    return engine.train_step(sample())["loss"], weights_of(engine)


def copied(stage: int, place, copy):
    """A checkpoint that is read and written again."""
    engine = _adam_engine(stage)
    assert Checkpoints(place, 1).resume(engine)
    Checkpoints(copy, 1).save(engine)


def _adam_engine(stage: int) -> Engine:
    ranks = this_rank()
    return Engine(tiny_config(ADAM | {"engine": zero(stage), "parallel": {"dp": ranks.world}}), ranks)


def tensors_of(place) -> dict:
    dcp_to_torch_save(Checkpoints(place, 1).complete()[0] / "state", place / "all.pt")
    return torch.load(place / "all.pt")


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_checkpoint_goes_on(stage, tmp_path):
    loss, weights = zero_ranks(2, first_part, stage, tmp_path)[0]
    again, found = zero_ranks(2, second_part, stage, tmp_path)[0]
    assert again == loss and largest_error(found, weights) == 0.0
    # At another stage and number of ranks every tensor is the same.
    zero_ranks(1, copied, 2, tmp_path, tmp_path / "copy")
    before, after = tensors_of(tmp_path), tensors_of(tmp_path / "copy")
    assert before.keys() == after.keys() and len(before) == 4 * len(weights)
    assert all(torch.equal(before[name], after[name]) for name in before)


def lost_step(stage: int):
    engine = Engine(tiny_config(SGD | {"engine": zero(stage), "optimizer": {"on_nonfinite": "skip"}}), this_rank())
    before = weights_of(engine)
    real = engine.distributed.backward
    engine.distributed.backward = lambda loss, last: real(loss * float("inf"), last)
    skipped = engine.train_step(sample())
    after = weights_of(engine)
    engine.distributed.backward = real
    return skipped["skipped"], largest_error(after, before), engine.train_step(sample())["skipped"]


@pytest.mark.parametrize("stage", range(4))
def test_a_gradient_that_is_not_finite_is_skipped(stage):
    assert zero_ranks(1, lost_step, stage) == [(True, 0.0, False)]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_of_overlong_rollouts_alone_changes_nothing(stage):
    told = {"step": 2, "skipped": True, "policy_loss": 0.0, "grad_norm": 0.0}
    sections = {"parallel": {"cp": 2}, "engine": zero(stage), "dtype": "float32"}
    found = zero_ranks(2, around_an_overlong_step, sections)
    assert found == [(told, True, [False, True, False])] * 2


def saved_after_a_lost_step(stage: int, place):
    """The third of: a checkpoint after a skipped step alone, an engine that goes on from it, and its next loss."""
    sections = ADAM | {"engine": zero(stage), "optimizer": {"on_nonfinite": "skip"}}
    engine, other = (Engine(tiny_config(sections), this_rank()) for _ in range(2))
    real = engine.distributed.backward
    engine.distributed.backward = lambda loss, last: real(loss * float("inf"), last)
    assert engine.train_step(sample())["skipped"]
    engine.distributed.backward = real
    Checkpoints(place, 1).save(engine)
    assert Checkpoints(place, 1).resume(other) and other.steps_done == 1
    losses = [each.train_step(sample())["loss"] for each in (engine, other)]
    return losses, largest_error(weights_of(other), weights_of(engine))


@pytest.mark.parametrize("stage", range(4))
def test_a_checkpoint_after_a_skipped_step_alone_can_be_read(stage, tmp_path):
    ((one, other), apart) = zero_ranks(1, saved_after_a_lost_step, stage, tmp_path)[0]
    assert one == other and apart == 0.0


BF16 = {"model": {"path": "tiny-qwen3", "vocab_size": 36}, "dtype": "bfloat16", "optimizer": {"lr": 1e-4}}


def bfloat16_steps(sections: dict):
    engine = Engine(tiny_config(BF16 | {"parallel": {"dp": 2}} | sections), this_rank())
    figures = [engine.train_step(sample()) for _ in range(3)]
    return [(f["loss"], f["grad_norm"]) for f in figures], {tensor.dtype for tensor in weights_of(engine).values()}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_steps_follow_those_of_fsdp2(stage):
    truth, found = (zero_ranks(2, bfloat16_steps, {"engine": e})[0] for e in ({"name": "fsdp2"}, zero(stage)))
    np.testing.assert_allclose(found[0], truth[0], rtol=2e-2)
    assert found[1] == truth[1] == {torch.bfloat16}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"dtype": "float64"}, "deepspeed has no float64; use plain or fsdp2"),
        ({"dtype": "bfloat16"}, "casts the decays of Gated DeltaNet layers to bfloat16"),
        (BF16 | {"engine": zero(0)}, "stage: 0 would update bfloat16 weights without float32 masters"),
        (
            {"dtype": "float32", "engine": zero(3), "lora": {"targets": ["lm_head", "q_proj"]}},
            "with deepspeed stage 3 the head cannot have an adapter",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(sections, message):
    with pytest.raises(ValueError, match=message):
        Engine(tiny_config({"engine": zero(1)} | sections), this_rank())


def adapters(sections: dict):
    engine = Engine(tiny_config(SGD | {"lora": {"r": 3}, "parallel": {"cp": 2}} | sections), this_rank())
    figures = [engine.train_step(sample()) for _ in range(2)]
    return [(f["loss"], f["grad_norm"]) for f in figures], weights_of(engine)


def several_adapters(engines: list[dict]):
    return [adapters({"engine": engine}) for engine in engines]


def test_adapters_are_trained_and_merged_as_in_plain():
    truth, *others = zero_ranks(2, several_adapters, [{"name": "plain"}, zero(2), zero(3)])[0]
    for figures, weights in others:
        np.testing.assert_allclose(figures, truth[0], rtol=BOUND)
        assert largest_error(weights, truth[1]) <= BOUND


@pytest.mark.parametrize("stage", [2, 3])
def test_recomputed_layers_change_nothing(stage):
    """Hooks of stage 3 run inside a recomputed layer."""
    cases = [
        SGD | {"parallel": {"cp": 2}, "engine": zero(stage), "memory": {"recompute": recompute}}
        for recompute in ("none", "layers", "layers_keep_mixers")
    ]
    cases.append(cases[2] | {"memory": {"recompute": "layers_keep_mixers", "recompute_layers": 2}})
    truth, *others = zero_ranks(2, several, cases)[0]
    for found in others:
        assert found.figures == truth.figures and largest_error(found.weights, truth.weights) == 0.0
