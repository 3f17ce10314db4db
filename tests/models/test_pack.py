import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.utils import _apply_to_tensors
from torch.utils._pytree import tree_leaves

from cp_engine.engine import Engine
from cp_engine.models.load import float32_parameters, load_model, prepare_for_trees
from cp_engine.models.tree_causal_lm import TreeCausalLM
from cp_engine.pack import DevicePack, device_pack
from cp_engine.sharding.forest import build_forest
from cp_engine.sharding.plan import shard_plan
from tests.distributed.engine_cases import sample, this_rank, tiny_config
from tests.forests import random_layout
from tests.models.flat import branching_rollouts, one_rank_pack


def test_engines_see_the_pack_as_one_opaque_leaf():
    pack = one_rank_pack(branching_rollouts(), 4)
    keywords = {"tree_pack": pack}
    assert tree_leaves(keywords) == [pack]
    seen = []
    assert _apply_to_tensors(seen.append, keywords)["tree_pack"] is pack and not seen


def test_the_pack_holds_the_plans_rows_and_occurrences():
    rollouts = branching_rollouts()
    pack = one_rank_pack(rollouts, None)
    assert pack.gdn is None and pack.token_id.shape == pack.position.shape == (1, pack.plan.rows)
    target = pack.edges.edge_target[pack.occurrence_edge]
    assert target.tolist() == [token for rollout in rollouts for token in rollout[1:]]
    assert pack.occurrence_position.tolist() == [j for rollout in rollouts for j in range(1, len(rollout))]


def test_a_plan_of_another_rank_is_an_error():
    plan = one_rank_pack([[1, 2]], None).plan
    with pytest.raises(AssertionError, match="plan of rank 0 of 2 on rank 0 of a group of 1"):
        device_pack(type(plan)(**{**vars(plan), "world": 2}))


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-qwen3.5"])
def test_bfloat16_gives_float32_log_probs_near_those_of_float32(preset):
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = load_model(preset, dtype)
        prepare_for_trees(model)
        pack = one_rank_pack(branching_rollouts(), getattr(model.config, "linear_conv_kernel_dim", None))
        log_prob, entropy = TreeCausalLM(model)(pack)
        (log_prob.sum() + entropy.sum()).backward()
        assert log_prob.dtype == entropy.dtype == torch.float32
        decays = {id(p) for p in float32_parameters(model, dtype)}
        for p in model.parameters():
            assert p.grad.dtype == (torch.float32 if id(p) in decays else dtype) and p.grad.isfinite().all()
        found[dtype] = log_prob.detach()
    # bfloat16 weights alone move the logits, whose standard deviation is 1.5, by about one per cent.
    assert (found[torch.bfloat16] - found[torch.float32]).abs().mean() < 0.05


def test_the_transport_of_the_configuration_reaches_attention():
    plan = one_rank_pack([[1, 2]], None).plan
    assert device_pack(plan).attention.transport == "auto"
    assert device_pack(plan, transport="collective").attention.transport == "collective"
    engine = Engine(tiny_config({"parallel": {"transport": "collective"}}), this_rank())
    packs = engine._packs(engine._prepare(sample()))
    assert [pack.attention.transport for _, pack, _ in packs] == ["collective"] * 3


def tensors_in(value, path: str = "pack") -> dict[str, torch.Tensor]:
    """Every tensor that an object holds, by where it is; kernels' own lists move at their first call."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    parts = {}
    if isinstance(value, tuple | list):
        parts = dict(enumerate(value))
    elif isinstance(value, dict):
        parts = {name: part for name, part in value.items() if name != "_prepared"}
    elif hasattr(value, "__dict__"):
        return tensors_in(vars(value), path)
    return {name: x for key, part in parts.items() for name, x in tensors_in(part, f"{path}.{key}").items()}


@pytest.mark.parametrize("exchange", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize("own_layout", [False, True])
def test_no_table_of_a_pack_stays_on_the_host(monkeypatch, exchange, own_layout):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    rollouts = branching_rollouts()
    forest = build_forest(np.concatenate(rollouts), np.cumsum([0, *map(len, rollouts)]))
    mask = np.ones(sum(map(len, rollouts)), bool)
    layouts = [random_layout(forest, seed, 2) for seed in (3, 4)]
    plan = shard_plan(
        forest, layouts[0], 1, mask, exchange, conv_width=4, window=9, gdn_layout=layouts[1] if own_layout else None
    )
    of_gdn = layouts[1] if own_layout else layouts[0]
    routes = [np.zeros((2, len(x.rank_tokens(1)), 1)) for x in (layouts[0], of_gdn)]
    on_host = DevicePack(plan, object(), "meta", routes[0], routes[1] if own_layout else None)
    assert "chains" in vars(on_host.gdn) and "readers" in vars(on_host.gdn.conv), "what layers would make, and wait for"
    there = on_host.on_device()
    before, after = tensors_in(on_host), tensors_in(there)
    assert before.keys() == after.keys() and len(before) > 60
    assert {name for name, x in before.items() if x.device.type != "cpu"} == set()
    assert {name for name, x in after.items() if x.device.type != "meta"} == set()
    assert all(x.shape == after[name].shape and x.dtype == after[name].dtype for name, x in before.items())
    assert there.gdn.device.type == there.gdn.conv.device.type == "meta" and there.gdn.conv.taps.device.type == "meta"
