"""Predicted memory of one rank: what weights, optimizer, activations, exchanges and the head hold, and the peak.

Bytes of tensors, as `torch.cuda.max_memory_allocated` counts them. The context of the device, libraries and
fragmentation come on top: `RESERVED`.

Per token and layer the activations are counted as the modules of `transformers` save them for backward: norms compute
in float32 and keep their input that wide; a linear layer keeps its input; a gated MLP of width I keeps four rows of I.
Nothing here imports torch.

Shapes: e bytes of an element, a of an accumulation (float32, or float64 for float64), C hidden size, I width of the
MLPs that a token goes through, Hq/Hk query and kv heads, D head size, HV value heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from cp_engine.model_sizes import ModelSizes
from cp_engine.sharding.cost import ModelShape

Recompute = Literal["none", "layers", "layers_keep_mixers"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "layers", "layers_keep_mixers")
HEAD_CHUNK = 2**26  # logits of one chunk of the reference head (`kernels/logprob`)
TRITON_HEAD_CHUNK = 2**30  # bytes of logits of one chunk of the Triton head
# Bytes that backward of attention keeps p and ds in, at head sizes that have one (`kernels/attention/triton`).
ATTENTION_WORKSPACE = 3 * 2**30
WORKSPACE_HEAD_SIZES = (129, 256)
_CHUNK = 64  # tokens of a chunk of the GDN kernels
RESERVED = 2 * 2**30  # device context, libraries' workspaces and fragmentation (predicted)


@dataclass(frozen=True, kw_only=True)
class MemorySetup:
    """Settings of a run that its memory depends on.

    Args:
        shards: ranks over which the engine spreads what it shards.
        adapter_parameters: trained ones of LoRA, on top of the model, which is frozen; None trains the model.
        adapter_width: sum of the ranks of the adapters of one layer.
        optimizer_moments: tensors of a parameter's size that the optimizer keeps: 2 for AdamW, 0 for SGD.
        triton_attention: the kernels of 16-bit models on Hopper GPUs, with a workspace at large head sizes.
        triton_gdn: the kernels of 16-bit models on GPUs, which keep the inverse of each chunk of 64 tokens.
        triton_head: the head's kernels on GPUs, which hold logits once.
        recompute_layers: recomputed are only so many layers, the first ones; None: all of them.
        liger: Liger's norms, SwiGLU and rotary embeddings, which keep rows in the model's dtype and fewer of them.
    """

    engine: Literal["plain", "fsdp2", "deepspeed"] = "plain"
    stage: int = 0
    shards: int = 1
    offload_states: bool = False
    adapter_parameters: int | None = None
    adapter_width: int = 0
    optimizer_moments: int = 2
    recompute: Recompute = "none"
    offload_activations: bool = False
    triton_attention: bool = True
    triton_gdn: bool = True
    triton_head: bool = True
    recompute_layers: int | None = None
    liger: bool = False


@dataclass(frozen=True)
class Traffic:
    """What the exchanges of a pack hold on a rank; all zero where nothing moves."""

    attention_buffers: int = 0  # bytes while an attention layer runs, staging included
    attention_kept: int = 0  # bytes of each attention layer from forward to backward, outputs apart: head shards
    gdn_kept: int = 0  # bytes of each GDN layer: history rows, entry states and A
    crosses: bool = False  # whether attention moves rows


@dataclass(frozen=True)
class Memory:
    """Predicted bytes on one rank, by what holds them."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # at the end of the forward pass
    exchange: int
    forward_peak: int
    backward_peak: int

    @property
    def peak(self) -> int:
        return max(self.forward_peak, self.backward_peak)

    def parts(self) -> dict[str, int]:
        """What holds memory at the peak."""
        names = ("weights", "gradients", "optimizer", "activations", "exchange")
        held = {name: getattr(self, name) for name in names}
        return held | {"working": self.peak - sum(held.values())}


def predict_memory(tokens: int, model: ModelSizes, setup: MemorySetup, traffic: Traffic = Traffic()) -> Memory:
    """Memory of a rank with so many local rows in the second or a later pack of a step, when gradients are there."""
    weights, gradients, optimizer = state_bytes(model, setup)
    held = weights + gradients + optimizer + traffic.attention_buffers
    recomputed, plain = _recomputed_and_plain(model, setup)

    def kept(layers: list[_Layers]) -> int:
        return sum(
            each.count * kept_bytes(tokens, each.attention, model, each.setup, traffic)
            for each in layers
            if not each.setup.offload_activations
        )

    def in_forward(each: _Layers) -> int:
        return tokens * forward_bytes(model, each.setup)

    def in_backward(each: _Layers) -> int:
        workspace = workspace_bytes(model, setup) if each.attention else 0
        return tokens * backward_bytes(each.attention, model, each.setup) + workspace

    activations = kept(recomputed) + kept(plain) + tokens * final_bytes(model, setup)
    head_forward, head_backward = head_bytes(tokens, model, setup)
    # The recomputed layers come first: what the plain ones keep is not there yet, and gone when backward returns.
    forward, backward = (
        max(*map(of, plain), *(of(each) - kept(plain) for each in recomputed), 0) for of in (in_forward, in_backward)
    )
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        exchange=traffic.attention_buffers,
        forward_peak=held + activations + max(head_forward, forward),
        backward_peak=held + activations + max(head_backward, backward, gradient_bytes(model, setup)),
    )


def first_layers(shape: ModelShape, count: int | None) -> tuple[int, int]:
    """How many of the first layers are of attention and how many recurrent; None: of all layers.

    Of a hybrid every k-th layer is taken for one of attention, as those of Qwen3.5 and Qwen3-Next are.
    """
    layers = shape.attention_layers + shape.gdn_layers
    count = layers if count is None else min(layers, count)
    attention = count * shape.attention_layers // layers
    return attention, count - attention


@dataclass(frozen=True)
class _Layers:
    """Decoder layers that keep the same."""

    count: int
    attention: bool
    setup: MemorySetup


def _recomputed_and_plain(model: ModelSizes, setup: MemorySetup) -> tuple[list[_Layers], list[_Layers]]:
    """The layers that are recomputed, which come first, and the others."""
    shape = model.shape
    attention, gdn = (0, 0) if setup.recompute == "none" else first_layers(shape, setup.recompute_layers)
    plain = replace(setup, recompute="none", recompute_layers=None, offload_activations=False)
    parts = (
        (setup, attention, gdn),
        (plain, shape.attention_layers - attention, shape.gdn_layers - gdn),
    )
    recomputed, others = (
        [_Layers(count, kind, of_part) for count, kind in ((softmax, True), (gdn, False)) if count]
        for of_part, softmax, gdn in parts
    )
    return recomputed, others


def most_tokens(capacity: int, model: ModelSizes, setup: MemorySetup, row_buffers: int = 0) -> int:
    """The most local rows whose predicted peak, with `RESERVED`, is within ``capacity`` bytes; 0 if none is.

    Args:
        row_buffers: bytes of exchange buffers for each local row.
    """

    def fits(tokens: int) -> bool:
        traffic = Traffic(attention_buffers=tokens * row_buffers, crosses=row_buffers > 0)
        return predict_memory(tokens, model, setup, traffic).peak + RESERVED <= capacity

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def accumulation(shape: ModelShape) -> int:
    return max(4, shape.element_bytes)


def state_bytes(model: ModelSizes, setup: MemorySetup) -> tuple[int, int, int]:
    """Weights with what is gathered of them at a time, gradients, and optimizer states with masters.

    bfloat16 weights that are trained have float32 masters; gradients add up in the masters' dtype.
    """
    e, low = model.shape.element_bytes, model.shape.element_bytes == 2
    adapters = setup.adapter_parameters
    frozen, trained = (0, model.parameters) if adapters is None else (model.parameters, adapters)
    wide = 4 if low else e
    masters, moments = (wide if low else 0) * trained, setup.optimizer_moments * wide * trained
    computed, gradients = e * (frozen + trained), wide * trained
    shards, host = setup.shards, setup.offload_states
    if setup.engine == "plain" or (setup.engine == "deepspeed" and setup.stage == 0):
        return computed, gradients, masters + moments
    if setup.engine == "fsdp2":
        # The shards of trained weights are the masters; root unit whole, layers one after the other, the next fetched.
        root, layer = model.embedding_parameters, model.layer_parameters
        gathered = e * (root + 2 * layer)
        if adapters is None:  # and their gradients, before they are reduced in the masters' dtype
            gathered += (root + layer) * (e + (wide if low else 0))
        sharded = (e * frozen + wide * trained, gradients, moments)
        weights, gradients, moments = (0, 0, 0) if host else (-(-part // shards) for part in sharded)
        return weights + gathered, gradients, moments
    states = 0 if host else -(-(masters + moments) // shards)
    if setup.stage < 3:
        return computed, gradients if setup.stage == 1 else -(-gradients // shards), states
    weights = 0 if host else -(-computed // shards)
    weights += e * (model.embedding_parameters + 2 * model.layer_parameters)
    return weights, -(-gradients // shards), states


def kept_bytes(tokens: int, attention: bool, model: ModelSizes, setup: MemorySetup, traffic: Traffic) -> int:
    """Bytes that one layer keeps from forward to backward."""
    moved = traffic.attention_kept if attention else traffic.gdn_kept
    if setup.recompute == "none":
        return tokens * inside_bytes(attention, model, setup) + moved
    row = model.shape.hidden * model.shape.element_bytes
    if setup.recompute == "layers_keep_mixers" or (attention and traffic.crosses):
        row += _mixer_results(attention, model, setup)
    return tokens * row + moved


def _mixer_results(attention: bool, model: ModelSizes, setup: MemorySetup) -> int:
    """Bytes of a token that attention or a recurrence returns: the output, and the log-sum-exp or the inverses."""
    shape, e = model.shape, model.shape.element_bytes
    if attention:
        return shape.query_heads * (shape.head_dim * e + accumulation(shape))
    return shape.gdn_value_heads * model.gdn_value_dim * e + _chunk_bytes(model, setup)


def inside_bytes(attention: bool, model: ModelSizes, setup: MemorySetup) -> int:
    """Bytes of a token that one layer saves for its own backward."""
    shape, e, a = model.shape, model.shape.element_bytes, accumulation(model.shape)
    norm = _norm_bytes(shape.hidden, 1, model, setup)
    mixer = _attention_bytes(model, setup) if attention else _gdn_bytes(model, setup) + _chunk_bytes(model, setup)
    mlp = (3 if setup.liger else 4) * shape.mlp_width * e
    if model.experts:
        # Rows are copied for each of their experts, before and after; routers keep logits, choices and indices.
        chosen = 2 * model.experts_per_token * shape.hidden * e + a * model.experts + 44 * model.experts_per_token
        shared = (shape.hidden + 1) * e if model.shared_expert else 0
        mlp += (chosen + shared) * model.expert_layers // model.layers
    return 2 * (norm + shape.hidden * e) + mixer + mlp + setup.adapter_width * e


def _norm_bytes(width: int, groups: int, model: ModelSizes, setup: MemorySetup) -> int:
    """An RMS norm over ``groups`` parts of a row: its input in float32 (with Liger as it comes), its root mean squares,
    and what its weight multiplies, unless the weight is frozen or Liger computes that again."""
    e, a = model.shape.element_bytes, accumulation(model.shape)
    if setup.liger:
        return e * width + a * groups
    if setup.adapter_parameters is not None:
        return a * width + a * groups
    return a * width + a * groups + (a if model.wide_norms else e) * width


def _attention_bytes(model: ModelSizes, setup: MemorySetup) -> int:
    shape, e, a = model.shape, model.shape.element_bytes, accumulation(model.shape)
    query, kv = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    total = e * (2 * query + 2 * kv) + a * shape.query_heads  # q, k, v, out, lse
    if model.head_norms:
        total += _norm_bytes(query, shape.query_heads, model, setup) + _norm_bytes(kv, shape.kv_heads, model, setup)
    if model.gated_attention:
        total += 2 * e * query
    return total


def _gdn_bytes(model: ModelSizes, setup: MemorySetup) -> int:
    shape, e, a = model.shape, model.shape.element_bytes, accumulation(model.shape)
    values = shape.gdn_value_heads * model.gdn_value_dim
    channels = 2 * shape.gdn_key_heads * model.gdn_key_dim + values
    if _on_triton(model, setup):
        gates, norm = (a + 3 * e) * shape.gdn_value_heads, 0  # a, b, g, beta
    else:
        gates = (3 * a + e) * shape.gdn_value_heads  # softplus in and out, g, beta
        norm = 3 * a * values + a * shape.gdn_value_heads  # float32 copies of its input and gate, and root mean squares
    return e * channels + gates + 3 * e * values + norm


def _on_triton(model: ModelSizes, setup: MemorySetup) -> bool:
    return setup.triton_gdn and model.shape.element_bytes == 2


def _chunk_bytes(model: ModelSizes, setup: MemorySetup) -> int:
    shape = model.shape
    if not _on_triton(model, setup):
        return 0
    return shape.gdn_value_heads * (_CHUNK * shape.element_bytes + 4)


def backward_bytes(attention: bool, model: ModelSizes, setup: MemorySetup) -> int:
    """Bytes of a token that backward of one layer holds at its worst moment, beside what all layers keep.

    A recomputed layer first saves everything again but what it keeps. Then the MLP holds gradients of its product and
    of both factors while it frees what it saved; later, without those rows, the mixer holds gradients of its output and
    of q, k, v in the accumulation dtype and again rounded. Without recompute, what is freed makes room for all but the
    first of it.
    """
    shape, e, a = model.shape, model.shape.element_bytes, accumulation(model.shape)
    width = shape.mlp_width * e
    if attention:
        rows = (shape.query_heads + 2 * shape.kv_heads) * shape.head_dim
        mixer = rows * (a + e) + shape.query_heads * shape.head_dim * e
    else:
        values = shape.gdn_value_heads * model.gdn_value_dim
        rows = 2 * shape.gdn_key_heads * model.gdn_key_dim + values
        mixer = rows * (a + 2 * e) + 2 * a * values
    if setup.recompute == "none":
        return 2 * shape.hidden * e + max(2 * width, mixer - 4 * width)
    again = inside_bytes(attention, model, setup)
    if setup.recompute == "layers_keep_mixers":
        again -= _mixer_results(attention, model, setup)
    if setup.liger:  # whose first norm saves the layer's input as it is
        again -= shape.hidden * e
    return shape.hidden * e + again + max(width, mixer - 4 * width)


def workspace_bytes(model: ModelSizes, setup: MemorySetup) -> int:
    """What backward of an attention layer holds beside its rows: all of it, however small the pack."""
    smallest, largest = WORKSPACE_HEAD_SIZES
    held = setup.triton_attention and model.shape.element_bytes == 2 and smallest <= model.shape.head_dim <= largest
    return ATTENTION_WORKSPACE * held


def final_bytes(model: ModelSizes, setup: MemorySetup = MemorySetup()) -> int:
    """Bytes of a token from the last layer to the head: the final norm, the predictors' rows, and three indices."""
    return _norm_bytes(model.shape.hidden, 1, model, setup) + model.shape.hidden * model.shape.element_bytes + 24


def forward_bytes(model: ModelSizes, setup: MemorySetup) -> int:
    """Bytes of a token that forward of one layer holds beside what it keeps: of a norm, or of a recomputed MLP."""
    shape, e, a = model.shape, model.shape.element_bytes, accumulation(model.shape)
    if setup.recompute == "none":
        return 2 * a * shape.hidden
    return max(3 * a * shape.hidden, 2 * e * shape.mlp_width + e * shape.hidden)


def head_bytes(tokens: int, model: ModelSizes, setup: MemorySetup) -> tuple[int, int]:
    """Bytes of the head in forward and in backward: a chunk's logits, and what is made of them.

    The reference holds logits, their log-softmax, probabilities, and gradients. The Triton head holds logits, which
    become their gradients, and adds the gradient of a trained weight up in the accumulation dtype; with sharding
    engines that is in the place of the gradients that are counted with the weights.
    """
    e, a = model.shape.element_bytes, accumulation(model.shape)
    if not setup.triton_head or e == 8:
        logits = min(HEAD_CHUNK, tokens * model.vocab)
        return logits * (e + 4 * a), logits * (4 * e + 4 * a)
    logits = min(TRITON_HEAD_CHUNK, tokens * model.vocab * e)
    trained = setup.engine == "plain" and setup.adapter_parameters is None
    return logits, logits + trained * a * model.vocab * model.shape.hidden


def gradient_bytes(model: ModelSizes, setup: MemorySetup) -> int:
    """The gradient of the embedding or the head as it comes out of backward, and again in the master's dtype.

    Sharding engines count theirs with the weights."""
    e = model.shape.element_bytes
    if setup.engine != "plain" or setup.adapter_parameters is not None:
        return 0
    return model.vocab * model.shape.hidden * (e + (4 if e == 2 else 0))
