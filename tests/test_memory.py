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

from benchmarks.step_models import QWEN3_8B, random_model, shape_config
from cp_engine import layer_memory, memory
from cp_engine.config import MemoryConfig, OptimizerConfig
from cp_engine.distributed.plain import PlainModel
from cp_engine.distributed.ranks import Ranks
from cp_engine.kernels.attention import triton as triton_attention
from cp_engine.kernels.attention.triton import stored_pass
from cp_engine.kernels.logprob import api as logprob
from cp_engine.kernels.logprob import triton as triton_head
from cp_engine.layer_memory import final_bytes, kept_bytes
from cp_engine.layers import attention as attention_layer
from cp_engine.memory import RESERVED, most_tokens, predict_memory, state_bytes
from cp_engine.memory_setup import RECOMPUTE, MemorySetup, Traffic
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


def tree(name: str, dtype: torch.dtype, recompute: str, layers: int | None = None) -> tuple[TreeCausalLM, ModelSizes]:
    model = load_model(name, dtype, VOCAB)
    prepare_for_trees(model)
    recompute_layers(model, MemoryConfig(recompute=recompute, recompute_layers=layers))
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
        predicted = TOKENS * final_bytes(sizes, setup)
        for layers, attention in ((shape.attention_layers, True), (shape.gdn_layers, False)):
            predicted += layers * kept_bytes(TOKENS, attention, sizes, setup, Traffic())
        assert predicted == pytest.approx(saved_bytes(module), rel=bound), recompute
        assert predicted == predict_memory(TOKENS, sizes, setup).activations


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3.5"])
@pytest.mark.parametrize("recompute", ["layers", "layers_keep_mixers"])
def test_a_part_of_the_layers_keeps_what_it_should(name, recompute):
    """Of the hybrid's four layers the first three are recurrent."""
    predicted = []
    for layers in (1, 2, 3, 4):
        module, sizes = tree(name, torch.bfloat16, recompute, layers)
        setup = MemorySetup(recompute=recompute, recompute_layers=layers, triton_gdn=False)
        predicted.append(predict_memory(TOKENS, sizes, setup).activations)
        assert predicted[-1] == pytest.approx(saved_bytes(module), rel=0.02), layers
    none, whole = (
        predict_memory(TOKENS, sizes, MemorySetup(recompute=mode, triton_gdn=False)) for mode in ("none", recompute)
    )
    assert none.activations > predicted[0] > predicted[1] > predicted[2] > predicted[3] == whole.activations


def test_the_peak_falls_layer_by_layer():
    """The first layers are recomputed when the others' memory is gone, so that the last one costs no peak."""
    sizes = model_sizes("qwen3-8b")
    setup = MemorySetup(engine="fsdp2", shards=8, recompute="layers_keep_mixers")
    peaks = [predict_memory(40_960, sizes, replace(setup, recompute_layers=n)).peak for n in range(1, 37)]
    assert peaks[-1] == predict_memory(40_960, sizes, setup).peak == pytest.approx(peaks[-2], rel=0.02)
    assert all(more > fewer + 5 * 2**30 for more, fewer in zip(peaks[:-2], peaks[1:-1], strict=True))
    none = predict_memory(40_960, sizes, replace(setup, recompute="none")).peak
    assert none > peaks[0] > none - 9 * 2**30


def test_kinds_of_the_first_layers():
    shape = model_sizes("qwen3.5-35b-a3b").shape
    assert (shape.attention_layers, shape.gdn_layers) == (10, 30)
    assert [memory.first_layers(shape, n) for n in (0, 3, 4, 7, 8, 40, None)] == [
        (0, 0), (0, 3), (1, 3), (1, 6), (2, 6), (10, 30), (10, 30)
    ]  # fmt: skip


def test_offloaded_layers_hold_nothing_and_the_others_what_they_save():
    sizes = model_sizes("qwen3-8b")
    setup = MemorySetup(recompute="layers", recompute_layers=30, offload_activations=True)
    plain = replace(setup, recompute="none", recompute_layers=None, offload_activations=False)
    held = 6 * kept_bytes(1000, True, sizes, plain, Traffic()) + 1000 * final_bytes(sizes, plain)
    assert predict_memory(1000, sizes, setup).activations == held


# GiB measured on one H200 in bfloat16: Qwen3-8B, whole or cut to nine layers, with adapters of rank 16 on every linear
# module, `benchmarks.step`. Two rows ran with the reference head and the library's own norms. The fourth ran in a
# process that may still have held the engine before it, whose weights and optimizer states (5.69) are taken off.
@pytest.mark.parametrize(
    ("layers", "tokens", "recompute", "recomputed", "liger", "measured"),
    [
        (9, 40_960, "none", None, True, 54.66),
        (9, 73_728, "none", None, True, 93.01),
        (36, 40_960, "layers_keep_mixers", 17, True, 128.47),
        (9, 40_960, "layers_keep_mixers", None, True, 24.09 - 5.69),
        (9, 40_960, "layers_keep_mixers", None, False, 20.57),
        (9, 81_920, "layers_keep_mixers", None, False, 35.42),
    ],
)
def test_peaks_that_were_measured_with_adapters(layers, tokens, recompute, recomputed, liger, measured):
    sizes = sizes_of_config({**QWEN3_8B, "num_hidden_layers": layers, "model_type": "qwen3"}, "Qwen3-8B")
    # In and out widths of q, k, v and o, and of the three of the MLP.
    width = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12_288)
    setup = MemorySetup(
        recompute=recompute,
        recompute_layers=recomputed,
        adapter_parameters=layers * 16 * width,
        adapter_width=7 * 16,
        liger=liger,
        triton_head=liger,
    )
    assert predict_memory(tokens, sizes, setup).peak / 2**30 == pytest.approx(measured, rel=0.04)


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
    ("recompute", "layers", "tokens", "vocab", "chunk"),
    [(mode, None, 1024, 256, 2**14) for mode in RECOMPUTE]
    + [(mode, count, 1024, 256, 2**14) for mode in RECOMPUTE[1:] for count in (1, 3)]
    + [("layers", None, 256, 8192, 2**21)],
)
def test_peaks_are_predicted(monkeypatch, recompute, layers, tokens, vocab, chunk):
    """Layers of some width, whose activations or whose head make the peak, in bfloat16."""
    module, sizes = wide_model(recompute, vocab, torch.bfloat16, layers=layers)
    forward, kept, backward = live_peaks(monkeypatch, module, tokens, vocab, chunk)
    setup = MemorySetup(engine="deepspeed", recompute=recompute, recompute_layers=layers, triton_head=False)
    predicted = predict_memory(tokens, sizes, setup)
    states = predicted.weights + predicted.gradients + predicted.optimizer
    assert predicted.activations == pytest.approx(kept, rel=0.05)
    assert predicted.forward_peak - states == pytest.approx(forward, rel=0.1)
    assert predicted.backward_peak - states == pytest.approx(backward, rel=0.1)


def live_peaks(monkeypatch, module: TreeCausalLM, tokens: int, vocab: int, chunk: int) -> tuple[int, int, int]:
    """Peak of forward, what it leaves, and peak of backward, with kernels that hold their results only."""
    monkeypatch.setattr(attention_layer, "attention", like_a_gpu)
    monkeypatch.setattr(attention_layer, "attention_backward", like_a_gpu_backward)
    monkeypatch.setattr(logprob, "MAX_CHUNK_LOGITS", chunk)
    monkeypatch.setattr(memory, "HEAD_CHUNK", chunk)
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
    return forward, kept, live.peak


def test_first_layers_make_a_lower_peak_than_last_ones(monkeypatch):
    """Two of four layers: a layer that is computed again while the others still hold theirs adds itself to the peak."""
    of_first, of_last = (wide_model("layers", 256, torch.bfloat16, layers=count)[0] for count in (2, None))
    for layer in of_last.causal_lm.base_model.layers[:2]:
        layer.gradient_checkpointing = False
    first, last = (live_peaks(monkeypatch, module, 1024, 256, 2**14) for module in (of_first, of_last))
    assert first[1] == last[1]
    sizes = wide_model("none", 256, torch.bfloat16)[1]
    assert last[2] - first[2] > 0.7 * 1024 * layer_memory.inside_bytes(True, sizes, MemorySetup())


def wide_model(
    recompute: str, vocab: int, dtype: torch.dtype, scale: int = 1, layers: int | None = None
) -> tuple[TreeCausalLM, ModelSizes]:
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
    recompute_layers(model, MemoryConfig(recompute=recompute, recompute_layers=layers))
    return TreeCausalLM(model).train(), sizes_of_config(config.to_dict(), "wide")


def wide_hybrid(recompute: str, vocab: int) -> tuple[TreeCausalLM, ModelSizes]:
    """Three recurrent layers with the heads of Qwen3.5-4B, and one of attention."""
    sizes = {"vocab_size": vocab, "hidden_size": 1024, "intermediate_size": 3072, "tie_word_embeddings": False}
    config = shape_config("qwen3.5-4b", 4)
    for name, size in sizes.items():
        setattr(config, name, size)
    model = random_model(config, torch.bfloat16, torch.device("cpu"))
    prepare_for_trees(model)
    recompute_layers(model, MemoryConfig(recompute=recompute))
    return TreeCausalLM(model).train(), sizes_of_config(config.to_dict(), "wide hybrid")


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
    assert layer_memory.ATTENTION_WORKSPACE == stored_pass.WORKSPACE
    assert layer_memory.WORKSPACE_HEAD_SIZES == triton_attention.STORED_SIZES
    model, setup = model_sizes("qwen3.5-35b-a3b"), MemorySetup(engine="fsdp2", shards=8, recompute="layers")
    for tokens in (1000, 30_000):
        held, without = (predict_memory(tokens, model, one) for one in (setup, replace(setup, triton_attention=False)))
        assert held.forward_peak == without.forward_peak
        attention, gdn = (tokens * layer_memory.backward_bytes(kind, model, setup) for kind in (True, False))
        assert held.parts()["working"] == max(attention + 3 * 2**30, gdn)
        assert without.parts()["working"] < held.parts()["working"] - 2**30
    wide = replace(model, shape=replace(model.shape, element_bytes=4))
    for other in (wide, model_sizes("qwen3-8b")):
        assert layer_memory.workspace_bytes(other, setup) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("kind", "recompute", "layers"),
    [
        *(("attention", mode, None) for mode in RECOMPUTE),
        ("attention", "layers", 2),
        ("hybrid", "none", None),
        ("hybrid", "layers_keep_mixers", None),
    ],
)
def test_peaks_on_a_gpu(kind, recompute, layers):
    """The second pack of a step, 16,384 tokens, of a small model in bfloat16 with float32 masters and AdamW."""
    vocab, tokens = 32_768, 16_384
    gc.collect()
    others = torch.cuda.memory_allocated()
    if kind == "attention":
        module, sizes = wide_model(recompute, vocab, torch.bfloat16, scale=4, layers=layers)
    else:
        module, sizes = wide_hybrid(recompute, vocab)
    device = torch.device("cuda")
    model = PlainModel(module.to(device), OptimizerConfig(), Ranks(0, 1, None, device))
    ids = np.random.default_rng(0).integers(0, vocab, tokens).tolist()
    plan = one_rank_pack([ids], conv_width(module.causal_lm.config)).plan
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
    predicted = predict_memory(tokens, sizes, MemorySetup(recompute=recompute, recompute_layers=layers))
    for name, measured, expected in (
        ("forward", forward, predicted.forward_peak),
        ("backward", backward, predicted.backward_peak),
    ):
        print(f"{kind}, {recompute}, {layers}: {name} {measured / 2**30:.2f} GiB, predicted {expected / 2**30:.2f}")
    assert predicted.forward_peak == pytest.approx(forward, rel=0.1)
    assert predicted.backward_peak == pytest.approx(backward, rel=0.1)
