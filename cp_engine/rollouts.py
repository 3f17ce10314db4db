"""Rollouts on disk and in memory: one sequence of token ids with what its loss needs, validated where it is made.

`docs/rollouts.md` fixes every field. Nothing here imports torch.

Shapes: L tokens of one rollout, R rollouts, N tokens of all of them.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from cp_engine.rollout_fields import (
    RolloutError,
    check_length,
    check_names,
    check_range,
    finite_number,
    integer_row,
    logprob_row,
    mask_row,
    number_row,
    route_keys,
    route_rows,
    shown,
    text_label,
)
from cp_engine.sharding.forest import Forest, build_forest
from cp_engine.sharding.packing import share_groups

MAX_ID = 2**31  # ids are sorted as four bytes; no vocabulary comes near


@dataclass(frozen=True, eq=False, slots=True)
class Rollout:
    """One rollout. Lists are turned into arrays; a broken rule raises `RolloutError` naming the field.

    Entry j of every per-token field belongs to token j. In the log-prob arrays NaN stands for null: no value there.
    """

    input_ids: np.ndarray  # int64 [L], L >= 1, each in [0, 2**31)
    loss_mask: np.ndarray  # bool [L]; entry 0 has no predictor and never counts
    group: str
    rollout: str
    reward: float | None = None
    advantage: float | np.ndarray | None = None  # a number, or float64 [L]
    old_logprobs: np.ndarray | None = None  # float64 [L]
    ref_logprobs: np.ndarray | None = None  # float64 [L]
    sampler_logprobs: np.ndarray | None = None  # float64 [L]
    share_key: np.ndarray | None = None  # int64 [L]
    routes: np.ndarray | None = None  # int16 [L, MoE layers, experts of a token]

    def __post_init__(self):
        group, name = text_label(self.group, "group"), text_label(self.rollout, "rollout")
        where = f"rollout {name!r} of group {group!r}"
        ids = integer_row(self.input_ids, "input_ids", where)
        if not len(ids):
            raise RolloutError(where, "input_ids", "expected at least one token id, got none")
        check_range(ids, 0, MAX_ID, "token ids", "input_ids", where)
        length = len(ids)
        checked = {"input_ids": ids, "group": group, "rollout": name}
        checked["loss_mask"] = mask_row(self.loss_mask, length, where)
        checked["reward"] = None if self.reward is None else finite_number(self.reward, "reward", where)
        if self.advantage is not None:
            per_token = isinstance(self.advantage, (list, tuple)) or getattr(self.advantage, "ndim", 0) > 0
            checked["advantage"] = (
                number_row(self.advantage, length, False, "advantage", where)
                if per_token
                else finite_number(self.advantage, "advantage", where)
            )
        for field in ("old_logprobs", "ref_logprobs", "sampler_logprobs"):
            value = getattr(self, field)
            if value is not None:
                checked[field] = logprob_row(value, length, field, where)
        if self.share_key is not None:
            checked["share_key"] = check_length(
                integer_row(self.share_key, "share_key", where), length, "share_key", where
            )
        if self.routes is not None:
            checked["routes"] = route_rows(self.routes, length, where)
        for field, value in checked.items():
            object.__setattr__(self, field, value)

    @property
    def length(self) -> int:
        return len(self.input_ids)

    @classmethod
    def from_dict(cls, record: Mapping, where: str) -> Rollout:
        """Rollout of one JSON object; fields that `docs/rollouts.md` does not name are ignored, if no field is meant.

        Args:
            where: what the errors start with, such as ``data.jsonl, line 3``.

        Raises:
            RolloutError: for a missing or misspelled field, or a broken rule.
        """
        if not isinstance(record, Mapping):
            raise RolloutError(where, None, f"expected a JSON object, got {shown(record)}")
        check_names(record, _FIELDS, where)
        try:
            return cls(**{name: record[name] for name in _FIELDS if name in record})
        except RolloutError as error:
            raise RolloutError(where, error.field, error.problem) from None


_FIELDS = tuple(field.name for field in fields(Rollout))


def check_limits(rollout: Rollout, where: str, vocab_size: int | None = None, max_tokens: int | None = None) -> Rollout:
    """Refuse a rollout with an id outside the vocabulary or more tokens than one pack may hold; else return it.

    Raises:
        RolloutError: starting with ``where``.
    """
    if vocab_size is not None:
        check_range(rollout.input_ids, 0, vocab_size, "ids of the vocabulary,", "input_ids", where)
    if max_tokens is not None and rollout.length > max_tokens:
        raise RolloutError(
            where,
            "input_ids",
            f"expected at most {max_tokens} tokens, the pack budget (max_pack_tokens), got {rollout.length}; "
            "raise the budget or leave the rollout out",
        )
    return rollout


def check_rollouts(
    rollouts: Sequence[Rollout], vocab_size: int | None = None, max_tokens: int | None = None
) -> Sequence[Rollout]:
    """`check_limits` for a batch that was built in memory; returns it.

    Raises:
        RolloutError: for an empty batch, an entry that is no `Rollout`, or a broken limit.
    """
    if not len(rollouts):
        raise RolloutError("rollouts", None, "expected at least one rollout, got none")
    for index, rollout in enumerate(rollouts):
        if not isinstance(rollout, Rollout):
            raise RolloutError(f"rollouts[{index}]", None, f"expected a Rollout, got {shown(rollout)}")
        check_limits(
            rollout, f"rollouts[{index}], {rollout.rollout!r} of group {rollout.group!r}", vocab_size, max_tokens
        )
    return rollouts


@dataclass(frozen=True, eq=False)
class FlatRollouts:
    """The token rows of R rollouts, one after the other: what forests and packs are built from."""

    token: np.ndarray  # int64 [N]
    row_start: np.ndarray  # int64 [R + 1]
    group: np.ndarray  # int64 [R], groups numbered by first appearance
    loss_mask: np.ndarray  # bool [N]
    share_key: np.ndarray | None  # int64 [N]; tells routes apart too
    routes: np.ndarray | None = None  # int16 [N, MoE layers, experts of a token]

    @property
    def rollouts(self) -> int:
        return len(self.group)

    @property
    def groups(self) -> int:
        return int(self.group.max(initial=-1)) + 1

    def forest(self, share: str = "batch", use_share_key: bool = True) -> Forest:
        """The forest of all rollouts: one trie (``batch``) or one for each group (``group``)."""
        key = self.share_key if use_share_key else None
        return build_forest(self.token, self.row_start, share_groups(share, self.group), key)


def flatten_rollouts(rollouts: Sequence[Rollout]) -> FlatRollouts:
    """Concatenate the token fields of rollouts; an empty batch gives empty arrays.

    Raises:
        RolloutError: where some rollouts have a share_key or routes and some have none, or routes of different models.
    """
    share_key = _joined([r.share_key for r in rollouts], np.int64) if _all_have("share_key", rollouts) else None
    routes = _joined_routes(rollouts) if _all_have("routes", rollouts) else None
    group_number: dict[str, int] = {}
    return FlatRollouts(
        token=_joined([r.input_ids for r in rollouts], np.int64),
        row_start=np.concatenate([[0], np.cumsum([r.length for r in rollouts], dtype=np.int64)]).astype(np.int64),
        group=np.array([group_number.setdefault(r.group, len(group_number)) for r in rollouts], np.int64),
        loss_mask=_joined([r.loss_mask for r in rollouts], bool),
        share_key=share_key if routes is None else route_keys(routes, share_key),
        routes=routes,
    )


def _all_have(field: str, rollouts: Sequence[Rollout]) -> bool:
    having = [getattr(r, field) is not None for r in rollouts]
    if any(having) and not all(having):
        with_it, without = rollouts[having.index(True)], rollouts[having.index(False)]
        raise RolloutError(
            "rollouts",
            field,
            "expected it on all rollouts of a batch or on none; "
            f"{with_it.rollout!r} of group {with_it.group!r} has one, "
            f"{without.rollout!r} of group {without.group!r} has none",
        )
    return any(having)


def _joined_routes(rollouts: Sequence[Rollout]) -> np.ndarray:
    sizes = rollouts[0].routes.shape[1:]
    for rollout in rollouts:
        if rollout.routes.shape[1:] != sizes:
            raise RolloutError(
                f"rollout {rollout.rollout!r} of group {rollout.group!r}",
                "routes",
                f"expected {sizes[0]} MoE layers with {sizes[1]} experts for each token, as the first rollout of the "
                f"batch has, got {rollout.routes.shape[1]} with {rollout.routes.shape[2]}",
            )
    return np.concatenate([r.routes for r in rollouts])


def _joined(arrays: list[np.ndarray], dtype) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def read_rollouts(
    path: str | Path,
    *,
    vocab_size: int | None = None,
    max_tokens: int | None = None,
    limit: int | None = None,
    limit_per_group: int | None = None,
) -> list[Rollout]:
    """Read a ``.jsonl`` or ``.jsonl.gz`` file, one rollout a line, in file order.

    Args:
        vocab_size: refuse ids that are not below it.
        max_tokens: refuse longer rollouts: the pack budget.
        limit: only the first rollouts of the file; the rest is not read.
        limit_per_group: only the first rollouts of each group. With ``limit``, both hold.

    Raises:
        RolloutError: for a broken rule, naming file, line and field; for a file that is missing, unreadable or empty.
    """
    path = Path(path)
    for name, value in (("limit", limit), ("limit_per_group", limit_per_group)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise RolloutError(str(path), None, "expected a .jsonl or .jsonl.gz file")
    found: list[Rollout] = []
    seen = 0
    taken: Counter[str] = Counter()
    for where, record in read_records(path):
        seen += 1
        rollout = Rollout.from_dict(record, where)
        if limit_per_group is None or taken[rollout.group] < limit_per_group:
            found.append(check_limits(rollout, where, vocab_size, max_tokens))
            taken[rollout.group] += 1
        if seen == limit:
            break
    if not found:
        raise RolloutError(str(path), None, "expected at least one rollout, but the file is empty")
    return found


def read_records(path: Path) -> Iterator[tuple[str, object]]:
    """The JSON value of every line that is not blank, and where it stands: ``FILE, line N``.

    Raises:
        RolloutError: for a file that is missing or unreadable, or a line that is not JSON.
    """
    opener = gzip.open if path.name.endswith(".gz") else open
    try:
        with opener(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.isspace():
                    where = f"{path}, line {number}"
                    yield where, _parsed(line, where)
    except FileNotFoundError:
        raise RolloutError(str(path), None, "expected a rollout file, but there is no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise RolloutError(str(path), None, f"expected a readable rollout file, but reading failed: {error}") from error


def _parsed(line: bytes, where: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RolloutError(where, None, f"expected one JSON object, but the line is not JSON: {error}") from None
