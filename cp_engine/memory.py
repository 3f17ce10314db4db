"""Predicted memory of one rank: what weights, optimizer, activations, exchanges and the head hold, and the peak.

Bytes of tensors, as `torch.cuda.max_memory_allocated` counts them. The context of the device, libraries and
fragmentation come on top: `RESERVED`. Nothing here imports torch.

Shapes: e bytes of an element, a of an accumulation (float32, or float64 for float64).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cp_engine.layer_memory import backward_bytes, final_bytes, forward_bytes, kept_bytes, workspace_bytes
from cp_engine.memory_setup import NOTHING_MOVES, MemorySetup, Traffic, accumulation
from cp_engine.model_sizes import ModelSizes
from cp_engine.sharding.cost import ModelShape

HEAD_CHUNK = 2**26  # logits of one chunk of the reference head (`kernels/logprob`)
TRITON_HEAD_CHUNK = 2**30  # bytes of logits of one chunk of the Triton head
RESERVED = 2 * 2**30  # device context, libraries' workspaces and fragmentation (predicted)


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


def predict_memory(tokens: int, model: ModelSizes, setup: MemorySetup, traffic: Traffic = NOTHING_MOVES) -> Memory:
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
    # A head's gradient waits for the embedding's where they are one parameter.
    waiting = tied_bytes(model, setup)
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
        backward_peak=held + activations + max(head_backward, waiting + backward, gradient_bytes(model, setup)),
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


def tied_bytes(model: ModelSizes, setup: MemorySetup) -> int:
    """The gradient of a trained head that is the embedding too, from the head's backward to the embedding's.

    Sharding engines count theirs with the weights."""
    trained = model.tied and setup.engine == "plain" and setup.adapter_parameters is None
    return trained * model.vocab * model.shape.hidden * model.shape.element_bytes


def gradient_bytes(model: ModelSizes, setup: MemorySetup) -> int:
    """The gradient of the embedding or the head as it comes out of backward, and again in the master's dtype.

    Sharding engines count theirs with the weights."""
    e = model.shape.element_bytes
    if setup.engine != "plain" or setup.adapter_parameters is not None:
        return 0
    return model.vocab * model.shape.hidden * (e + (4 if e == 2 else 0))
