"""Recomputed layers: the same gradients, no collective more, whoever holds the weights."""

import contextlib
import gc
import threading
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from cp_engine.config import MemoryConfig, parse_config
from cp_engine.engine import Engine
from cp_engine.models import recompute
from cp_engine.models.precision import keep_float64
from cp_engine.step import pack_loss
from tests.distributed.engine_cases import sample, this_rank, tiny_config, whole_gradients
from tests.ranks import run_ranks

COLLECTIVES = (
    "all_to_all_single",
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_gather_object",
    "broadcast",
)
MODES = ("layers", "layers_keep_mixers")
CASES = {
    "gather and affine": {"parallel": {"cp": 2, "exchange": "gather", "gdn_layout": "same"}},
    "ring and ulysses": {"parallel": {"cp": 2, "exchange": "ring", "gdn_exchange": "ulysses"}},
    "ulysses and own layout": {"parallel": {"cp": 2, "exchange": "ulysses", "gdn_layout": "own"}},
    "fsdp2": {"parallel": {"cp": 2}, "engine": {"name": "fsdp2"}},
    "experts": {"parallel": {"cp": 2}, "model": {"path": "tiny-qwen3.5-moe", "vocab_size": 36}},
}


def few():
    return sample()[:5]


@contextlib.contextmanager
def counted():
    """Calls of collectives by name."""
    calls = dict.fromkeys(COLLECTIVES, 0)

    def counting(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, counting(name, getattr(dist, name))))
        yield calls


def gradients(sections: dict, memory: dict, kinds=None):
    """All gradients of a step in float64, and its collectives."""
    kept = recompute._KINDS if kinds is None else dict.fromkeys(recompute._KINDS, kinds)
    with keep_float64(), mock.patch.object(recompute, "_KINDS", kept):
        engine = Engine(tiny_config(sections | {"memory": memory}), this_rank())
        step = engine.lookahead.step(few())
        with counted() as calls:
            engine.accumulate_gradients(step)
        return whole_gradients(engine), calls


def several(sections: dict, memories: list[dict]):
    return [gradients(sections, memory) for memory in memories]


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_same_and_nothing_moves_twice(case):
    memories = [{}, *({"recompute": mode} for mode in MODES)]
    for (truth, calls), *others in run_ranks(2, several, CASES[case], memories):
        assert calls["all_to_all_single"] > 20
        for found, again in others:
            assert again == calls
            assert found.keys() == truth.keys()
            assert all(torch.equal(found[name], truth[name]) for name in truth)


@pytest.mark.parametrize("engine", ["plain", "fsdp2"])
def test_gradients_are_the_same_with_any_number_of_recomputed_layers(engine):
    sections = {"parallel": {"cp": 2}, "engine": {"name": engine}}
    memories = [{}, *({"recompute": MODES[n % 2], "recompute_layers": n} for n in range(1, 5))]
    for (truth, calls), *others in run_ranks(2, several, sections, memories):
        for found, again in others:
            assert again == calls and found.keys() == truth.keys()
            for name, gradient in truth.items():
                assert float((found[name] - gradient).abs().max()) <= 1e-12 * float(gradient.abs().max())


def test_an_exchange_that_is_not_kept_is_seen():
    arguments = CASES["gather and affine"], {"recompute": "layers"}
    (_, kept), (_, lax) = (run_ranks(2, gradients, *arguments, kinds)[0] for kinds in (None, frozenset()))
    assert lax["all_to_all_single"] > kept["all_to_all_single"]


def kernel_calls(sections: dict, memories: list[dict]):
    """How often attention and the recurrence compute a forward pass in a step."""
    from cp_engine.layers import attention, gdn_mixer

    found, mixing = [], gdn_mixer._Mixing
    for memory in memories:
        with (
            mock.patch.object(attention, "attention", wraps=attention.attention) as kernel,
            mock.patch.object(mixing, "finish", autospec=True, side_effect=mixing.finish) as mixer,
        ):
            gradients(sections, memory)
        found.append((kernel.call_count, mixer.call_count))
    return found


def test_outputs_of_mixers_are_kept_where_asked_or_where_they_took_an_exchange():
    memories = [{}, *({"recompute": mode} for mode in MODES)]
    none, layers, mixers = kernel_calls({}, memories)
    assert layers == (2 * none[0], 2 * none[1]) and mixers == none
    none, layers, mixers = run_ranks(2, kernel_calls, CASES["gather and affine"], memories)[0]
    assert layers == (none[0], 2 * none[1]) and mixers == none


def test_only_the_first_layers_are_computed_again():
    """Three recurrent layers, then one of attention."""
    found = kernel_calls({}, [{"recompute": "layers", "recompute_layers": n} for n in (1, 2, 3, 4)])
    (attention, gdn) = found[0][0], found[3][1] // 2
    assert found == [(attention, gdn * (3 + n) // 3) for n in (1, 2, 3)] + [(2 * attention, 2 * gdn)]


def packs_in_flight(memory: dict, offload: bool):
    """Gradients of packs whose forward passes all come before their backward passes, and which packs are left."""
    with keep_float64():
        engine = Engine(tiny_config({"memory": {}, "parallel": {"cp": dist.get_world_size()}}), this_rank())
        recompute.recompute_layers(engine.model.causal_lm, MemoryConfig(**memory, offload_activations=offload))
        step = engine.lookahead.step(sample())
        losses, alive = [], []
        for planned, on_device, _ in engine._packs(step):
            result = pack_loss(engine.model, on_device, step, planned.pack, engine.config.loss, torch.float64)
            losses.append(result.loss)
            alive.append(weakref.ref(on_device))
        del on_device, result
        while losses:
            losses.pop(0).backward()
        gc.collect()
        gradient = {name: parameter.grad for name, parameter in engine.model.named_parameters()}
        return gradient, [pack() is not None for pack in alive]


def each_in_flight(cases):
    return [packs_in_flight(*case) for case in cases]


def test_packs_in_flight_see_their_own_plans_and_are_freed():
    cases = [({"recompute": "none"}, False), *(({"recompute": mode}, mode == "layers") for mode in MODES)]
    (truth, _), *others = run_ranks(2, each_in_flight, cases)[1]
    for found, alive in others:
        assert len(alive) > 1 and not any(alive)
        assert all(torch.equal(found[name], truth[name]) for name in truth)


def in_another_thread(inside) -> tuple[dict[str, torch.Tensor], list[Exception]]:
    """Gradients of one pack whose backward runs in a thread that nobody told to keep float64, as on CUDA."""
    run_backward, failed = torch.autograd._engine_run_backward, []
    with mock.patch.object(recompute, "same_precision", inside), keep_float64():
        engine = Engine(tiny_config({"memory": {"recompute": "layers"}, "packing": {}}), this_rank())
        step = engine.lookahead.step(few())
        ((planned, on_device, _),) = engine._packs(step)
        loss = pack_loss(engine.model, on_device, step, planned.pack, engine.config.loss, torch.float64).loss

        def backward():
            try:
                run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True)
            except RuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    return {name: parameter.grad for name, parameter in engine.model.named_parameters()}, failed


def test_recomputation_in_another_thread_keeps_float64():
    with keep_float64():
        engine = Engine(tiny_config({"packing": {}}), this_rank())
        engine.accumulate_gradients(engine.lookahead.step(few()))
    found, failed = in_another_thread(recompute.same_precision)
    assert not failed
    for name, parameter in engine.model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-14 * float(parameter.grad.abs().max()))
    _, failed = in_another_thread(contextlib.nullcontext)
    assert failed  # torch sees casts that the forward pass did not make


def test_settings_without_effect_are_refused():
    with pytest.raises(ValueError, match="moves what recomputed layers keep, and recompute is none"):
        parse_config({"model": {"path": "x"}, "memory": {"offload_activations": True}})
    with pytest.raises(ValueError, match="recompute_layers is 3, and recompute is none; set recompute: layers or"):
        parse_config({"model": {"path": "x"}, "memory": {"recompute_layers": 3}})
    for value in ("all", 0, -1):
        with pytest.raises(ValueError, match="expected a whole number of at least 1, auto, or null; got"):
            parse_config({"model": {"path": "x"}, "memory": {"recompute": "layers", "recompute_layers": value}})
    for tokens in (None, "auto"):
        sections = {"memory": {"recompute": "layers", "recompute_layers": "auto"}}
        with pytest.raises(ValueError, match="auto chooses for packs of a given size, and packing.max_pack_tokens is"):
            parse_config({"model": {"path": "x"}, "packing": {"max_pack_tokens": tokens}} | sections)
    with pytest.raises(ValueError, match="memory.recompute_layers is 5, and the model has 4 decoder layers: give at"):
        Engine(tiny_config({"memory": {"recompute": "layers", "recompute_layers": 5}}), this_rank())
    with pytest.raises(ValueError, match="these ranks run on CPUs"):
        Engine(tiny_config({"memory": {"recompute": "layers", "offload_activations": True}}), this_rank())
