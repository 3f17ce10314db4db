"""Bytes of a token in one decoder layer: what it keeps from forward to backward, and what it holds while it runs.

Activations are counted as the modules of `transformers` save them for backward: norms compute in float32 and keep their
input that wide; a linear layer keeps its input; a gated MLP of width I keeps four rows of I.

Nothing here imports torch.

Shapes: e bytes of an element, a of an accumulation (float32, or float64 for float64), C hidden size, I width of the
MLPs that a token goes through, Hq/Hk query and kv heads, D head size, HV value heads.
"""

from __future__ import annotations

from cp_engine.memory_setup import MemorySetup, Traffic, accumulation
from cp_engine.model_sizes import ModelSizes

# Bytes that backward of attention keeps p and ds in, at head sizes that have one (`kernels/attention/triton`).
ATTENTION_WORKSPACE = 3 * 2**30
WORKSPACE_HEAD_SIZES = (129, 256)
_CHUNK = 64  # tokens of a chunk of the GDN kernels


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
    freed = (3 if setup.liger else 4) * width  # of the MLP, before the mixer
    if attention:
        rows = (shape.query_heads + 2 * shape.kv_heads) * shape.head_dim
        mixer = rows * (a + e) + shape.query_heads * shape.head_dim * e
    elif _on_triton(model, setup):
        mixer = shape.gdn_value_heads * model.gdn_value_dim * e + recurrence_bytes(model)
    else:
        values = shape.gdn_value_heads * model.gdn_value_dim
        rows = 2 * shape.gdn_key_heads * model.gdn_key_dim + values
        mixer = rows * (a + 2 * e) + 2 * a * values
    if setup.recompute == "none":
        return 2 * shape.hidden * e + max(2 * width, mixer - freed)
    again = inside_bytes(attention, model, setup)
    if setup.recompute == "layers_keep_mixers":
        again -= _mixer_results(attention, model, setup)
    if setup.liger:  # whose first norm saves the layer's input as it is
        again -= shape.hidden * e
    return shape.hidden * e + again + max(width, mixer - freed)


def recurrence_bytes(model: ModelSizes) -> int:
    """Bytes of a token that the Triton kernels' backward of convolution and recurrence holds beside what was kept.

    In chunks of 64 tokens: q, k and v again; w and u; v' and its gradient; dq, dk (wide) and dw; the states and their
    gradients, and when these are gone dk and dv. The convolution comes when all but dq, dk and dv are gone, and holds
    less.
    """
    shape, e, a = model.shape, model.shape.element_bytes, accumulation(model.shape)
    keys, heads = shape.gdn_key_heads * model.gdn_key_dim, shape.gdn_value_heads
    values, channels = heads * model.gdn_value_dim, 2 * keys + heads * model.gdn_value_dim
    again = e * (channels + heads * model.gdn_key_dim + 2 * values)  # q, k, v, w, u and the gradient of v'
    states = 2 * e * values * model.gdn_key_dim // _CHUNK
    inside = e * values + (e + a) * keys + e * heads * model.gdn_key_dim + max(states, e * (keys + values))
    return again + inside


def workspace_bytes(model: ModelSizes, setup: MemorySetup) -> int:
    """What backward of an attention layer holds beside its rows: all of it, however small the pack."""
    smallest, largest = WORKSPACE_HEAD_SIZES
    held = setup.triton_attention and model.shape.element_bytes == 2 and smallest <= model.shape.head_dim <= largest
    return ATTENTION_WORKSPACE * held


def final_bytes(model: ModelSizes, setup: MemorySetup) -> int:
    """Bytes of a token from the last layer to the head: the final norm, the predictors' rows, and three indices."""
    return _norm_bytes(model.shape.hidden, 1, model, setup) + model.shape.hidden * model.shape.element_bytes + 24


def forward_bytes(model: ModelSizes, setup: MemorySetup) -> int:
    """Bytes of a token that forward of one layer holds beside what it keeps: of a norm, or of a recomputed MLP."""
    shape, e, a = model.shape, model.shape.element_bytes, accumulation(model.shape)
    if setup.recompute == "none":
        return 2 * a * shape.hidden
    return max(3 * a * shape.hidden, 2 * e * shape.mlp_width + e * shape.hidden)
