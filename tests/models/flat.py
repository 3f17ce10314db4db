"""The oracle of the model tests: every rollout run alone by the unmodified `transformers` model."""

from __future__ import annotations

import numpy as np
import torch

from cp_engine.models.shape import attention_window, conv_width
from cp_engine.models.tree_causal_lm import TreeCausalLM
from cp_engine.pack import DevicePack, device_pack
from cp_engine.sharding.forest import build_forest
from cp_engine.sharding.layout import contiguous_layout
from cp_engine.sharding.plan import shard_plan


def branching_rollouts(vocab: int = 512, seed: int = 0) -> list[list[int]]:
    """Branches after 1, 2, 3, 37 and 101 tokens, with a duplicate, a prefix, a lone token, several roots."""
    rng = np.random.default_rng(seed)

    def new(count: int) -> list[int]:
        return rng.integers(0, vocab, count).tolist()

    trunk = new(37)
    middle = trunk + new(64)
    rollouts = [middle + new(9), middle + new(2) + new(5), trunk + new(1), trunk + new(20)]
    fork = middle + new(3)
    rollouts += [fork + new(1), fork + new(2), trunk[:2] + new(6), trunk[:1] + new(3)]
    return [*rollouts, rollouts[1], middle, new(1), new(5)]


def one_rank_pack(rollouts: list[list[int]], conv_width: int | None, window: int | None = None) -> DevicePack:
    lengths = [len(rollout) for rollout in rollouts]
    forest = build_forest(np.concatenate(rollouts), np.cumsum([0, *lengths]))
    mask = np.ones(sum(lengths), bool)
    plan = shard_plan(forest, contiguous_layout(forest, 1), 0, mask, conv_width=conv_width, window=window)
    return device_pack(plan)


def weights(rollouts: list[list[int]]) -> torch.Tensor:
    """One weight of either sign for each (rollout, position > 0)."""
    count = sum(len(rollout) - 1 for rollout in rollouts)
    return torch.from_numpy(np.random.default_rng(5).normal(size=count))


def flat_run(model, rollouts, temperature: float):
    """Log-probs [O] and entropies [O] of all rollouts, one after the other, and the gradient of every parameter."""
    model.zero_grad()
    log_probs, entropies = [], []
    for rollout in rollouts:
        ids = torch.tensor([rollout])
        if len(rollout) == 1:
            continue
        z = model(input_ids=ids, use_cache=False).logits[0, :-1] / temperature
        log_p = z.log_softmax(-1)
        log_probs.append(log_p.gather(1, ids[0, 1:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return _backward(model, torch.cat(log_probs), torch.cat(entropies), weights(rollouts))


def tree_run(tree: TreeCausalLM, rollouts, temperature: float):
    """The same through the tree."""
    tree.zero_grad()
    pack = one_rank_pack(rollouts, conv_width(tree.causal_lm.config), attention_window(tree.causal_lm.config))
    log_prob, entropy = tree(pack, temperature)
    edge = pack.occurrence_edge  # in the order of (rollout, position)
    return _backward(tree.causal_lm, log_prob[edge], entropy[edge], weights(rollouts))


def _backward(model, log_prob, entropy, weight):
    weight = weight.to(log_prob.dtype)
    ((log_prob + 0.1 * entropy) * weight).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return log_prob.detach(), entropy.detach(), gradients


def worst_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest error of a tensor over max(its own maximum, 1e-3 of the largest of all), and the tensor's name."""
    assert found.keys() == expected.keys()
    floor = 1e-3 * max(float(tensor.abs().max()) for tensor in expected.values())
    errors = {
        name: float((found[name] - tensor).abs().max()) / max(float(tensor.abs().max()), floor)
        for name, tensor in expected.items()
    }
    worst = max(errors, key=errors.get)
    return errors[worst], worst
