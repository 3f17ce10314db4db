"""Rollout files that gain a field.

Shapes: L tokens of one rollout.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cp_engine.rollouts import read_records


def check_out_file(path: str | Path) -> Path:
    """The path, if a rollout file can be written there.

    Raises:
        ValueError: for another ending than .jsonl or .jsonl.gz, a folder, or one that is missing.
    """
    path = Path(path)
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(f"{path}: expected a name that ends with .jsonl or .jsonl.gz")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist")
    return path


def add_field(source: str | Path, out: str | Path, field: str, values: Sequence[np.ndarray]) -> None:
    """Copy a rollout file with one more per-token field; an older field of that name is replaced, all else is kept.

    The file is written beside ``out`` and renamed, so ``out``, which may be ``source``, is always whole.

    Args:
        source: `.jsonl` or `.jsonl.gz`; ``out`` likewise.
        values: float64 [L] of each rollout, in file order; NaN becomes null.

    Raises:
        ValueError: if the file has another number of rollouts than there are values, or ``out`` cannot be written.
    """
    out = check_out_file(out)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            if out.name.endswith(".gz"):
                with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:  # no time stamp: equal runs, equal files
                    _write(packed, Path(source), field, values)
            else:
                _write(file, Path(source), field, values)
        partial.replace(out)
    except OSError as error:
        raise ValueError(f"cannot write {out}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def _write(file: BinaryIO, source: Path, field: str, values: Sequence[np.ndarray]) -> None:
    written = 0
    for _, record in read_records(source):
        if written < len(values):
            row = values[written]
            numbers = [None if missing else v for v, missing in zip(row.tolist(), np.isnan(row).tolist(), strict=True)]
            file.write(json.dumps(record | {field: numbers}).encode() + b"\n")
        written += 1
    if written != len(values):
        raise ValueError(f"{source} has {written} rollouts, but {len(values)} were computed: it changed meanwhile")
