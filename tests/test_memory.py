"""The memory model against what autograd really saves, and against the peaks of a whole pack."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cp_engine import memory
from cp_engine.config import MemoryConfig, OptimizerConfig
from cp_engine.distributed.plain import PlainModel
from cp_engine.distributed.ranks import Ranks
from cp_engine.kernels.attention import triton as triton_attention
from cp_engine.kernels.attention.triton import stored_pass
from cp_engine.kernels.logprob import api as logprob
from cp_engine.kernels.logprob import triton as triton_head
from cp_engine.layers import attention as attention_layer
from cp_engine.memory import (
    RECOMPUTE,
    RESERVED,
    MemorySetup,
    Traffic,
    final_bytes,
    kept_bytes,
    most_tokens,
    predict_memory,
    state_bytes,
)
from cp_engine.model_sizes import ModelSizes, model_sizes, sizes_of_config
from cp_engine.models.load import load_model, prepare_for_trees
from cp_engine.models.recompute import recompute_layers
from cp_engine.models.shape import conv_width
from cp_engine.models.tree_causal_lm import TreeCausalLM
from cp_engine.pack import device_pack
from cp_engine.sharding.exchange import kept as kept_module
from tests.models.flat import one_rank_pack

TOKENS, VOCAB = 160, 64
MODELS = ("tiny-llama", "tiny-qwen3", "tiny-qwen3-moe", "tiny-qwen3.5", "tiny-qwen3.5-moe", "tiny-qwen3-next")


def tree(name: str, dtype: torch.dtype, recompute: str) -> tuple[TreeCausalLM, ModelSizes]:
    model = load_model(name, dtype, VOCAB)
    prepare_for_trees(model)
    recompute_layers(model, MemoryConfig(recompute=recompute))
    sizes = sizes_of_config(model.config.to_dict(), name)
    sizes = replace(sizes, shape=replace(sizes.shape, element_bytes=dtype.itemsize))
    return TreeCausalLM(model).train(), sizes


def saved_bytes(module: TreeCausalLM) -> int:
    """Bytes of distinct memory that a forward pass leaves for backward, parameters and indices of the pack apart."""
    ids = np.random.default_rng(0).integers(0, VOCAB, TOKENS).tolist()
    pack = one_rank_pack([ids], conv_width(module.causal_lm.config))
    known = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    held, kept = {}, []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)  # or its memory would be used again
        return tensor

    results, add = [], kept_module._Results.add

    def keep(self, made):
        add(self, made)
        results.extend(made)

    hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    with hooks, mock.patch.object(kept_module._Results, "add", keep):
        module(pack)
    return sum(held.values()) + sum(result.untyped_storage().nbytes() for result in results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_activations_are_what_autograd_saves(name, dtype):
    bound = 0.02 if dtype == torch.bfloat16 else 0.04  # casts to float32 that are none share memory
    for recompute in RECOMPUTE:
        module, sizes = tree(name, dtype, recompute)
        setup, shape = MemorySetup(recompute=recompute, triton_gdn=False), sizes.shape
        predicted = TOKENS * final_bytes(sizes)
        for layers, attention in ((shape.attention_layers, True), (shape.gdn_layers, False)):
            predicted += layers * kept_bytes(TOKENS, attention, sizes, setup, Traffic())
        assert predicted == pytest.approx(saved_bytes(module), rel=bound), recompute


class LiveBytes(TorchDispatchMode):
    """Counts the memory that operators make, and its peak; what is ``known`` before is not counted."""

    def __init__(self, known):
        super().__init__()
        self.live = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.live:
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage._cdata)
        return result

    def _freed(self, number: int) -> None:
        self.now -= self.live.pop(number)


def like_a_gpu(q, k, v, intervals, scale, backend, accumulate=False):
    """The memory of a kernel that holds nothing but its results."""
    return torch.empty_like(q), torch.zeros(q.shape[:2])


def like_a_gpu_backward(q, k, v, *arguments, **options):
    return tuple(torch.zeros(x.shape) for x in (q, k, v))


@pytest.mark.parametrize(
    ("recompute", "tokens", "vocab", "chunk"),
    [(mode, 1024, 256, 2**14) for mode in RECOMPUTE] + [("layers", 256, 8192, 2**21)],
)
def test_peaks_are_predicted(monkeypatch, recompute, tokens, vocab, chunk):
    """Layers of some width, whose activations or whose head make the peak, in bfloat16."""
    monkeypatch.setattr(attention_layer, "attention", like_a_gpu)
    monkeypatch.setattr(attention_layer, "attention_backward", like_a_gpu_backward)
    monkeypatch.setattr(logprob, "MAX_CHUNK_LOGITS", chunk)
    monkeypatch.setattr(memory, "HEAD_CHUNK", chunk)
    module, sizes = wide_model(recompute, vocab, torch.bfloat16)
    ids = np.random.default_rng(0).integers(0, vocab, tokens).tolist()
    pack = one_rank_pack([ids], None)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [tensor for parameter in module.parameters() for tensor in (parameter, parameter.grad)]
    with LiveBytes(known) as live:
        log_prob, entropy = module(pack)
        forward, kept = live.peak, live.now
        loss, live.peak = log_prob.sum() + entropy.sum(), 0
        loss.backward()
    predicted = predict_memory(tokens, sizes, MemorySetup(engine="deepspeed", recompute=recompute, triton_head=False))
    states = predicted.weights + predicted.gradients + predicted.optimizer
    assert predicted.activations == pytest.approx(kept, rel=0.05)
    assert predicted.forward_peak - states == pytest.approx(forward, rel=0.1)
    assert predicted.backward_peak - states == pytest.approx(live.peak, rel=0.1)


def wide_model(recompute: str, vocab: int, dtype: torch.dtype, scale: int = 1) -> tuple[TreeCausalLM, ModelSizes]:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        hidden_size=256 * scale,
        intermediate_size=768 * scale,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32 * scale,
        vocab_size=vocab,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    prepare_for_trees(model)
    recompute_layers(model, MemoryConfig(recompute=recompute))
    return TreeCausalLM(model).train(), sizes_of_config(config.to_dict(), "wide")


def test_states_by_hand():
    model = model_sizes("qwen3-8b")
    count, root = model.parameters, 2 * 151_936 * 4096
    assert model.embedding_parameters == root and model.layer_parameters == (count - root) // 36
    assert state_bytes(model, MemorySetup()) == (2 * count, 4 * count, 12 * count)
    assert state_bytes(model, MemorySetup(optimizer_moments=0)) == (2 * count, 4 * count, 4 * count)
    adapters = MemorySetup(adapter_parameters=10**7)
    assert state_bytes(model, adapters) == (2 * (count + 10**7), 4 * 10**7, 12 * 10**7)
    unsharded = 2 * (root + 2 * model.layer_parameters) + 6 * (root + model.layer_parameters)
    sharded = state_bytes(model, MemorySetup(engine="fsdp2", shards=8))
    assert sharded == (count // 2 + unsharded, count // 2, count)
    assert state_bytes(model, MemorySetup(engine="fsdp2", shards=8, offload_states=True)) == (unsharded, 0, 0)
    by_stage = {
        1: (2 * count, 4 * count, 12 * count // 8),
        2: (2 * count, 4 * count // 8, 12 * count // 8),
        3: (2 * count // 8 + 2 * (root + 2 * model.layer_parameters), 4 * count // 8, 12 * count // 8),
    }
    for stage, expected in by_stage.items():
        assert state_bytes(model, MemorySetup(engine="deepspeed", stage=stage, shards=8)) == expected


def test_the_most_tokens_fit_and_one_more_does_not():
    model, setup = model_sizes("qwen3-8b"), MemorySetup(engine="fsdp2", shards=8, recompute="layers")
    for capacity in (80 * 10**9, 141 * 10**9):
        for buffers in (0, 6000):
            most = most_tokens(capacity, model, setup, buffers)
            peaks = [
                predict_memory(tokens, model, setup, Traffic(tokens * buffers, crosses=buffers > 0)).peak
                for tokens in (most, most + 1)
            ]
            assert most > 1000 and peaks[0] + RESERVED <= capacity < peaks[1] + RESERVED
    assert most_tokens(10**9, model, setup) == 0


def test_the_head_by_hand():
    """65,536 rows of Qwen3-8B: a chunk of bfloat16 logits, and a trained head's gradient in float32."""
    model, tokens = model_sizes("qwen3-8b"), 65_536
    assert memory.TRITON_HEAD_CHUNK == triton_head.CHUNK_BYTES and memory.HEAD_CHUNK == logprob.MAX_CHUNK_LOGITS
    wide = 4 * 151_936 * 4096
    assert memory.head_bytes(tokens, model, MemorySetup()) == (2**30, 2**30 + wide)
    for setup in (MemorySetup(adapter_parameters=10**7), MemorySetup(engine="fsdp2", shards=8)):
        assert memory.head_bytes(tokens, model, setup) == (2**30, 2**30)
    assert memory.head_bytes(100, model, MemorySetup(engine="fsdp2", shards=8)) == (30_387_200, 30_387_200)
    assert memory.head_bytes(tokens, model, MemorySetup(triton_head=False)) == (18 * 2**26, 24 * 2**26)


def test_the_workspace_of_attention_by_hand():
    """At head size 256 of 16-bit models alone, in backward alone, whatever the tokens."""
    assert memory.ATTENTION_WORKSPACE == stored_pass.WORKSPACE
    assert memory.WORKSPACE_HEAD_SIZES == triton_attention.STORED_SIZES
    model, setup = model_sizes("qwen3.5-35b-a3b"), MemorySetup(engine="fsdp2", shards=8, recompute="layers")
    for tokens in (1000, 30_000):
        held, without = (predict_memory(tokens, model, one) for one in (setup, replace(setup, triton_attention=False)))
        assert held.forward_peak == without.forward_peak
        assert held.parts()["working"] == tokens * memory.backward_bytes(True, model, setup) + 3 * 2**30
        assert without.parts()["working"] < held.parts()["working"] - 2**31
    wide = replace(model, shape=replace(model.shape, element_bytes=4))
    for other in (wide, model_sizes("qwen3-8b")):
        assert memory.workspace_bytes(other, setup) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_peaks_on_a_gpu(recompute):
    """The second pack of a step, 16,384 tokens, of a small model in bfloat16 with float32 masters and AdamW."""
    vocab, tokens = 32_768, 16_384
    gc.collect()
    others = torch.cuda.memory_allocated()
    module, sizes = wide_model(recompute, vocab, torch.bfloat16, scale=4)
    device = torch.device("cuda")
    model = PlainModel(module.to(device), OptimizerConfig(), Ranks(0, 1, None, device))
    plan = one_rank_pack([np.random.default_rng(0).integers(0, vocab, tokens).tolist()], None).plan
    pack = device_pack(plan, None, device)
    sum(part.sum() for part in model(pack)).backward()
    model.update(1e-5, None)  # makes the optimizer's states
    sum(part.sum() for part in model(pack)).backward()
    torch.cuda.reset_peak_memory_stats()
    loss = sum(part.sum() for part in model(pack))
    torch.cuda.synchronize()
    forward = torch.cuda.max_memory_allocated() - others
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    torch.cuda.synchronize()
    backward = torch.cuda.max_memory_allocated() - others
    predicted = predict_memory(tokens, sizes, MemorySetup(recompute=recompute))
    told = [f"{value / 2**30:.2f}" for value in (forward, predicted.forward_peak, backward, predicted.backward_peak)]
    print(f"{recompute}: GiB forward measured {told[0]} predicted {told[1]}, backward {told[2]} and {told[3]}")
    assert predicted.forward_peak == pytest.approx(forward, rel=0.1)
    assert predicted.backward_peak == pytest.approx(backward, rel=0.1)
