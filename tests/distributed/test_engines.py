"""The engines on (dp, cp) meshes: loss, gradients and weights equal to flat rows, whoever holds the weights."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

import cp_engine.lookahead
from cp_engine.distributed.fsdp2 import Fsdp2Model
from cp_engine.distributed.mesh import shard_mesh
from cp_engine.distributed.ranks import Ranks
from cp_engine.engine import Engine
from cp_engine.models.load import load_model
from cp_engine.models.precision import keep_float64
from cp_engine.verify.compare import gradient_error
from tests.distributed.engine_cases import flat_oracle, gradients, sample, this_rank, tiny_config
from tests.ranks import run_ranks

NAMES = ("plain", "fsdp2")
MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1)]


@pytest.fixture(scope="module")
def flat():
    return flat_oracle()


class _Given:
    """Gradients in the form that `gradient_error` judges."""

    def __init__(self, found):
        self.found = found

    def named_parameters(self):
        for name, gradient in self.found.items():
            parameter = torch.nn.Parameter(torch.zeros_like(gradient))
            parameter.grad = gradient
            yield name, parameter


def judged(results, flat, bound=1e-10):
    assert sum(loss for loss, _, _ in results) == pytest.approx(flat.loss, rel=1e-12)
    for _, _, found in results[:: max(1, len(results) - 1)]:
        assert gradient_error(_Given(found), flat.gradient).error <= bound


@pytest.mark.parametrize("name", ["plain", "fsdp2"])
@pytest.mark.parametrize(("dp", "cp"), MESHES, ids=lambda v: str(v))
def test_gradients_are_those_of_flat_rows(flat, name, dp, cp):
    sections = {"parallel": {"dp": dp, "cp": cp}, "engine": {"name": name}}
    results = run_ranks(dp * cp, gradients, flat, {}, sections)
    judged(results, flat)
    packs = len(flat.step.packs)
    assert packs == 3 and sum(empty for _, empty, _ in results) == cp * (-packs % dp)


@pytest.mark.parametrize(("dp", "cp"), [(2, 1), (4, 1), (2, 2)], ids=str)
def test_packs_fill_the_rounds_of_the_groups_and_are_exact(flat, dp, cp):
    """Three packs for one group, and four for two: nobody has an empty one."""
    results = run_ranks(dp * cp, gradients, flat, {}, {"parallel": {"dp": dp, "cp": cp}}, None, True)
    assert len(flat.step.packs) == 3 and not any(empty for _, empty, _ in results)
    judged(results, flat)


def faulty_gradients(fault: str, *args):
    """`gradients` of an engine with a fault."""
    with pytest.MonkeyPatch.context() as patch:
        if fault == "averaged":
            patch.setattr(Fsdp2Model, "backward", lambda model, loss, last: loss.backward())
        elif fault == "own packs only":
            patch.setattr("cp_engine.distributed.plain.sum_gradients", lambda parameters, ranks: None)
        else:  # every group gets the first group's packs
            deal = cp_engine.lookahead.deal_packs
            patch.setattr("cp_engine.lookahead.deal_packs", lambda packs, dp: deal(packs, dp)[:1] * dp)
        return gradients(*args)


@pytest.mark.parametrize(
    ("fault", "name"), [("averaged", "fsdp2"), ("own packs only", "plain"), ("same packs twice", "plain")]
)
def test_planted_faults_are_seen(flat, fault, name):
    sections = {"parallel": {"dp": 2}, "engine": {"name": name}}
    results = run_ranks(2, faulty_gradients, fault, flat, {}, sections)
    for _, _, found in results:
        assert gradient_error(_Given(found), flat.gradient).error > 1e-2


def test_shards_within_a_machine_are_replicated_over_machines(flat):
    sections = {"parallel": {"dp": 2, "cp": 2}, "engine": {"name": "fsdp2", "shard": "node"}}
    judged(run_ranks(4, gradients, flat, {}, sections, 2), flat)
    with pytest.raises(ValueError, match="needs equally many ranks on every machine; 4 ranks run, 3 of them"):
        shard_mesh(Ranks(0, 4, None, torch.device("cpu"), per_node=3), within_node=True, timeout_s=600)


@pytest.mark.parametrize("loss", ["gspo", "dpo"])
def test_losses_over_whole_rollouts_on_a_mesh(loss):
    coupled = flat_oracle(loss=loss)
    results = run_ranks(4, gradients, coupled, {"loss": loss}, {"parallel": {"dp": 2, "cp": 2}})
    judged(results, coupled)


def test_experts_and_their_routers_loss_with_sharded_weights():
    fields = {"model": "tiny-qwen3.5-moe"}
    experts = flat_oracle(**fields)
    assert experts.router_aux_coef > 0
    sections = {"parallel": {"dp": 2, "cp": 2}, "engine": {"name": "fsdp2"}}
    judged(run_ranks(4, gradients, experts, fields, sections), experts)


def bfloat16_steps(sections: dict):
    """Losses of three steps in bfloat16, dtypes of the streamed weights, and log-probs."""
    engine = Engine(tiny_config({"dtype": "bfloat16", "optimizer": {"lr": 1e-4}} | sections), this_rank())
    computed = {name: parameter.dtype for name, parameter in engine.model.causal_lm.named_parameters()}
    losses = [engine.train_step(sample())["loss"] for _ in range(3)]
    streamed = {name: tensor.clone() for name, tensor in engine.named_full_weights()}
    return losses, streamed, computed


def test_bfloat16_models_have_float32_masters_and_decays():
    """Steps far below the spacing of bfloat16 add up in the masters; the same whoever holds them."""
    start = load_model("tiny-qwen3.5", torch.bfloat16, 36)
    plain, sharded = (
        run_ranks(2, bfloat16_steps, {"parallel": {"dp": 2}, "engine": {"name": name}})[0]
        for name in ("plain", "fsdp2")
    )
    for losses, streamed, _ in (plain, sharded):
        assert losses == pytest.approx(plain[0], rel=2e-2)
        for name, tensor in streamed.items():
            decays = name.endswith(("A_log", "dt_bias"))
            assert tensor.dtype == (torch.float32 if decays else torch.bfloat16), name
            first = dict(start.named_parameters())[name].float()
            moved = (tensor.float() - first).abs().max()
            assert moved <= 2.0**-8 * first.abs().max() + 1e-3
            if decays:
                assert 1e-4 < moved < 4e-4  # three steps of 1e-4, which bfloat16 would round away
    assert plain[2] == {name: tensor.dtype for name, tensor in plain[1].items()}


def decay_gradients(sections: dict):
    """Gradients of the parameters that stay float32 in bfloat16, and of one that does not: whole, on this rank."""
    engine = Engine(tiny_config({"dtype": "bfloat16"} | sections), this_rank())
    engine.accumulate_gradients(engine.lookahead.step(sample()))
    masters = getattr(engine.distributed, "masters", {})
    found = {}
    for name, parameter in engine.model.causal_lm.named_parameters():
        if name.endswith(("A_log", "dt_bias", "in_proj_a.weight")):
            gradient = masters.get(parameter, parameter).grad
            found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


def test_decays_beside_shards_have_gradients_summed_over_ranks():
    plain, sharded = (run_ranks(2, decay_gradients, {"parallel": {"cp": 2}, "engine": {"name": n}}) for n in NAMES)
    assert len(plain[0]) == 9
    for rank, found in enumerate(sharded):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, plain[rank][name], rtol=1e-3, atol=1e-6)


def lost_step(sections: dict):
    engine = Engine(tiny_config({"optimizer": {"on_nonfinite": "skip"}} | sections), this_rank())
    before = {name: tensor.clone() for name, tensor in engine.named_full_weights()}
    real = engine.distributed.backward
    engine.distributed.backward = lambda loss, last: real(loss * float("nan"), last)
    lost = engine.train_step(sample())
    unchanged = all(torch.equal(tensor, before[name]) for name, tensor in engine.named_full_weights())
    engine.distributed.backward = real
    return lost["skipped"], unchanged, engine.train_step(sample())["skipped"], engine.steps_done


@pytest.mark.parametrize("name", ["plain", "fsdp2"])
def test_a_step_that_is_not_finite_is_skipped_and_reported(name):
    found = run_ranks(2, lost_step, {"parallel": {"dp": 2}, "engine": {"name": name}})
    assert found == [(True, True, False, 2)] * 2


def around_an_overlong_step(sections: dict):
    """Metrics of an overlong step between two others, and whether it left everything else as it would be without it."""
    long = sorted((len(r.input_ids) for r in sample()), reverse=True)[3]
    loss = {"name": "dapo", "entropy_coef": 0.1, "overlong_tokens": long} | sections.pop("loss", {})
    optimizer = {"lr": 1e-2, "weight_decay": 0.1, "schedule": "linear"}
    sections = {"loss": loss, "optimizer": optimizer, "steps": 4, **sections}
    cut = [r for r in sample() if len(r.input_ids) >= long]
    ended = []
    for steps in ([sample(), cut, sample()], [sample(), None, sample()]):
        engine, metrics = Engine(tiny_config(sections), this_rank()), []
        for present, following in zip(steps, [*steps[1:], None], strict=True):
            if present is None:
                engine.steps_done += 1
            else:
                metrics.append(engine.train_step(present, following))
        ended.append((metrics[-1]["lr"], metrics[-1]["loss"], dict(engine.named_full_weights()), metrics))
    (lr, loss, weights, metrics), (true_lr, true_loss, truth, _) = ended
    same = (lr, loss) == (true_lr, true_loss) and all(torch.equal(weights[name], truth[name]) for name in truth)
    whole, skipped = metrics[:2]
    told = {name: skipped[name] for name in ("step", "skipped", "policy_loss", "grad_norm")}
    assert skipped["entropy"] > 0 and 0 < skipped["tflop"] < 0.5 * whole["tflop"]
    return told, same, [each["skipped"] for each in metrics]


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"dp": 2}},
        {"parallel": {"cp": 2}, "engine": {"name": "fsdp2"}},
        {
            "parallel": {"cp": 2},
            "model": {"path": "tiny-qwen3-moe", "vocab_size": 36},
            "loss": {"router_aux_coef": 0.1},
        },
    ],
    ids=["plain", "fsdp2", "routers"],
)
def test_a_step_of_overlong_rollouts_alone_changes_nothing(sections):
    told = {"step": 2, "skipped": True, "policy_loss": 0.0, "grad_norm": 0.0}
    assert run_ranks(2, around_an_overlong_step, sections) == [(told, True, [False, True, False])] * 2


def logprobs_between_steps(sections: dict):
    with keep_float64():
        engine = Engine(tiny_config({"optimizer": {"lr": 1e-2}} | sections), this_rank())
        before = engine.logprobs(sample())
        engine.train_step(sample())
        return np.concatenate(before), np.concatenate(engine.logprobs(sample()))


def test_logprobs_on_a_mesh_follow_the_weights():
    alone = logprobs_between_steps({})
    for name in ("plain", "fsdp2"):
        sections = {"parallel": {"dp": 2, "cp": 2}, "engine": {"name": name}}
        for found, expected in zip(run_ranks(4, logprobs_between_steps, sections)[3], alone, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert np.nanmax(np.abs(alone[1] - alone[0])) > 1e-2


def adapter_steps(sections: dict):
    engine = Engine(
        tiny_config({"dtype": "bfloat16", "lora": {"r": 4}, "optimizer": {"lr": 1e-2}} | sections), this_rank()
    )
    losses = [engine.train_step(sample())["loss"] for _ in range(4)]
    return losses, {tensor.dtype for _, tensor in engine.named_full_weights(adapter=True)}


def test_bfloat16_adapters_learn_on_a_frozen_sharded_model():
    plain, sharded = (
        run_ranks(2, adapter_steps, {"parallel": {"dp": 2}, "engine": {"name": name}})[0] for name in ("plain", "fsdp2")
    )
    np.testing.assert_allclose(sharded[0], plain[0], rtol=2e-2)
    assert plain[0][-1] < plain[0][0] - 0.02 and sharded[1] == plain[1] == {torch.bfloat16}


def what_stays(name: str) -> list[str]:
    """Of an engine that has trained and that nobody refers to any more, what is still in memory."""
    ranks = this_rank()
    sections = {"dtype": "bfloat16", "engine": {"name": name}, "parallel": {"cp": ranks.world}}
    engine = Engine(tiny_config(sections), ranks)
    engine.train_step(sample())
    weight = next(engine.model.causal_lm.parameters())
    watched = {name: weakref.ref(x) for name, x in {"engine": engine, "model": engine.model, "weight": weight}.items()}
    del engine, weight
    gc.collect()
    return [name for name, reference in watched.items() if reference() is not None]


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_that_nobody_refers_to_is_freed(name):
    assert run_ranks(2, what_stays, name)[0] == []
