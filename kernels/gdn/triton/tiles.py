"""Tensor descriptors: whole tiles fetched by Hopper's copy unit, so that no register holds an address.

What it does not bear, on one H200 with Triton 3.6: a store at a negative coordinate is an illegal instruction (a load
there gives zeros); and in a pipelined loop a tile that is read inside a branch is overwritten by the next one.

Shapes: n rows, R state rows, H value heads, K and V head sizes.
"""

from __future__ import annotations

import torch

from cp_engine.kernels.gdn.triton.primitives import on_hopper
from cp_engine.kernels.shared.triton import padded

# Two buffers of the five tiles of dqkwg, 64 x 128, take 160 of a multiprocessor's 227 KiB; three of a state pass's two
# tiles 96, and of the reverse pass's three 144.
LARGEST = 128


def tiles_fit(x: torch.Tensor, columns: int, *others: int) -> bool:
    """Whether tiles of ``columns`` can stand for rows like x: whole heads, powers of two, of 16 bits a number.

    Cards before Hopper have no copy unit, and the compiler (Triton 3.6) fails on these kernels for later ones. The
    interpreter knows no limit of memory, so there float32 is taken too.

    Args:
        others: further head sizes that must be whole.
    """
    whole = columns <= LARGEST and all(padded(size) == size for size in (columns, *others))
    return whole and on_hopper(x.device) and (x.element_size() == 2 or x.device.type == "cpu")


def tile_rows(x: torch.Tensor, rows: int, columns: int):
    """A tensor descriptor of x [n, ...] as [n, product of the others]; tiles of ``rows`` and ``columns``."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x.view(len(x), -1), [rows, columns])


def tile_states(x: torch.Tensor, rows: int, columns: int):
    """A tensor descriptor of states [R, H, K, V] as [R H K, V]; row -1 of a state lies outside."""
    return tile_rows(x.view(-1, x.shape[-1]), rows, columns)
