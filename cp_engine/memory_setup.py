"""What the memory of a rank depends on. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cp_engine.sharding.cost import ModelShape

Recompute = Literal["none", "layers", "layers_keep_mixers"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "layers", "layers_keep_mixers")


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


NOTHING_MOVES = Traffic()


def accumulation(shape: ModelShape) -> int:
    return max(4, shape.element_bytes)
