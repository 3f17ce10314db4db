"""Checks of single rollout fields: each takes what a user or a JSON file gave and returns an array or raises.

Rows are long, so every check works on whole rows in C; only the error path looks at single entries.

Shapes: L tokens of one rollout.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Mapping

import numpy as np

NEEDED = ("input_ids", "loss_mask", "group", "rollout")
LOGPROB_ROUNDING = 1e-6  # a log-prob this far above 0 is the rounding of a sampler, not an error
MAX_EXPERTS = 2**15  # expert ids are kept in two bytes


class RolloutError(ValueError):
    """A rollout that breaks a rule: where it stands, which field, what was expected and what came."""

    def __init__(self, where: str, field: str | None, problem: str):
        super().__init__(where, field, problem)
        self.where, self.field, self.problem = where, field, problem

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.field and f"field {self.field}", self.problem) if part)


def shown(value) -> str:
    """A value as an error message quotes it."""
    text = repr(value)
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({type(value).__name__})"


def check_names(record: Mapping, known: tuple[str, ...], where: str) -> None:
    """Refuse an object without a needed field, or with another spelling of an optional one in its place.

    Advantages or log-probs that are passed over for their name would train something else without a word.
    """
    for field in NEEDED:
        if field not in record:
            names = [repr(name) for name in record]
            has = ", ".join(names[:8] + ["..."] * (len(names) > 8)) or "no fields"
            remedy = "; nothing is tokenized here" if field == "input_ids" else ""
            raise RolloutError(
                where, field, f"expected this field, but it is missing; the object has {has}{remedy} (docs/rollouts.md)"
            )
    meant = {_spelling(name): name for name in known}
    for name in record:
        field = meant.get(_spelling(name))
        if name not in known and field is not None and record.get(field) is None and record[name] is not None:
            raise RolloutError(where, name, f"expected the name {field}: rename it, since other fields are ignored")


def _spelling(name: object) -> str:
    """Equal for names that differ in case, in underscores, or in a plural's s."""
    return str(name).lower().replace("_", "").removesuffix("s")


def text_label(value, field: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, np.integer)):
        raise RolloutError("rollout", field, f"expected a string or an integer, got {shown(value)}")
    return str(value)


def finite_number(value, field: str, where: str) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise RolloutError(where, field, f"expected a number, got {shown(value)}")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise RolloutError(where, field, f"expected a finite number, got {shown(value)}")
    return result


def check_length(values: np.ndarray, length: int, field: str, where: str) -> np.ndarray:
    if len(values) != length:
        raise RolloutError(where, field, f"expected {length} entries, one for each of input_ids, got {len(values)}")
    return values


def check_range(values: np.ndarray, low: int, high: int, what: str, field: str, where: str) -> None:
    if values.min() >= low and values.max() < high:
        return
    at = int(np.argmax((values < low) | (values >= high)))
    raise RolloutError(where, field, f"expected {what} in [{low}, {high}), got {values[at]} at entry {at}")


def _vector(value, what: str, field: str, where: str):
    """A list, tuple or one-dimensional array, as it is."""
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim == 1):
        return value
    came = f"an array of shape {value.shape}" if isinstance(value, np.ndarray) else shown(value)
    if not isinstance(value, np.ndarray) and hasattr(value, "tolist") and getattr(value, "ndim", 0):
        came = f"a {type(value).__name__}: pass its .tolist()"
    raise RolloutError(where, field, f"expected a list of {what}, got {came}")


def integer_row(value, field: str, where: str) -> np.ndarray:
    """int64 [L]; the type test runs once a row in C, since rows are long."""
    value = _vector(value, "integers", field, where)
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "iu":
            raise RolloutError(where, field, f"expected integers, got an array of {value.dtype}")
        if value.dtype == np.uint64 and value.max(initial=0) >= 2**63:
            raise RolloutError(where, field, f"expected 64-bit signed integers, got {value.max()}")
        return value.astype(np.int64, copy=False)
    try:
        if bool not in map(type, value):
            return np.frombuffer(array("q", value), np.int64)
    except (TypeError, OverflowError):
        pass
    at, bad = next((i, v) for i, v in enumerate(value) if not _is_int64(v))
    raise RolloutError(where, field, f"expected 64-bit integers, got {shown(bad)} at entry {at}")


def _is_int64(value) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def mask_row(value, length: int, where: str) -> np.ndarray:
    value = _vector(value, "0 and 1", "loss_mask", where)
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biu":
            raise RolloutError(where, "loss_mask", f"expected 0 or 1, got an array of {value.dtype}")
        entries = value
    else:
        try:
            # bytes() takes integers below 256 (and booleans) only, and is the fastest way from a list to an array.
            entries = np.frombuffer(bytes(value), np.uint8)
        except (TypeError, ValueError):
            at, bad = next((i, v) for i, v in enumerate(value) if not isinstance(v, int) or v not in (0, 1))
            raise RolloutError(where, "loss_mask", f"expected 0 or 1, got {shown(bad)} at entry {at}") from None
    check_length(entries, length, "loss_mask", where)
    wrong = (entries != 0) & (entries != 1)
    if wrong.any():
        at = int(wrong.argmax())
        raise RolloutError(where, "loss_mask", f"expected 0 or 1, got {entries[at]} at entry {at}")
    return entries.astype(bool)


def number_row(value, length: int, nulls: bool, field: str, where: str) -> np.ndarray:
    """float64 [L]; null is None in a list and NaN in an array, and becomes NaN."""
    value = _vector(value, "numbers", field, where)
    check_length(value, length, field, where)
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "fiu":
            raise RolloutError(where, field, f"expected numbers, got an array of {value.dtype}")
        numbers = value.astype(np.float64, copy=False)
        missing = np.isnan(numbers)
    else:
        # One test a type, not one an entry.
        for kind in set(map(type, value)):
            null = nulls and kind is type(None)
            if not null and (kind is bool or not issubclass(kind, (int, float, np.integer, np.floating))):
                at = next(i for i, v in enumerate(value) if type(v) is kind)
                raise RolloutError(where, field, f"expected a number, got {shown(value[at])} at entry {at}")
        try:
            numbers = np.array(value, np.float64)
        except OverflowError:
            at = next(i for i, v in enumerate(value) if v is not None and abs(v) > sys.float_info.max)
            raise RolloutError(where, field, f"expected finite numbers, got {shown(value[at])} at entry {at}") from None
        missing = np.array([v is None for v in value], bool)
    bad = ~np.isfinite(numbers) if not nulls else ~(np.isfinite(numbers) | missing)
    if bad.any():
        at = int(bad.argmax())
        raise RolloutError(where, field, f"expected finite numbers, got {numbers[at]} at entry {at}")
    return numbers


def logprob_row(value, length: int, field: str, where: str) -> np.ndarray:
    numbers = number_row(value, length, True, field, where)
    positive = numbers > LOGPROB_ROUNDING
    if positive.any():
        at = int(positive.argmax())
        raise RolloutError(where, field, f"expected log-probs, which are at most 0, got {numbers[at]} at entry {at}")
    return numbers


def route_rows(value, length: int, where: str) -> np.ndarray:
    """int16 [L, MoE layers, k]: the experts of each token in each MoE layer, ascending."""
    expected = "expected, for each token, one list of expert ids for each MoE layer, all of one length"
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise RolloutError(where, "routes", f"{expected}; got {shown(value)}")
    try:
        routes = np.asarray(value)
    except ValueError:
        raise RolloutError(where, "routes", f"{expected}; got lists of different lengths") from None
    check_length(routes, length, "routes", where)
    if routes.ndim != 3 or routes.dtype.kind not in "iu" or 0 in routes.shape:
        raise RolloutError(where, "routes", f"{expected}; got an array of {routes.dtype} with shape {routes.shape}")
    if routes.min() < 0 or routes.max() >= MAX_EXPERTS:
        bad = routes.min() if routes.min() < 0 else routes.max()
        raise RolloutError(where, "routes", f"expected expert ids in [0, {MAX_EXPERTS}), got {bad}")
    routes = np.sort(routes.astype(np.int16), axis=-1)
    twice = (routes[..., 1:] == routes[..., :-1]).any(axis=(1, 2))
    if twice.any():
        at = int(twice.argmax())
        raise RolloutError(where, "routes", f"expected different experts in each list, got one twice at entry {at}")
    return routes


def route_keys(routes: np.ndarray, share_key: np.ndarray | None) -> np.ndarray:
    """int64 [N]: equal for two tokens if and only if their routes, and their share keys where given, are equal."""
    columns = routes.reshape(len(routes), -1).astype(np.uint64)
    if share_key is not None:
        columns = np.concatenate([columns, share_key.astype(np.int64).view(np.uint64)[:, None]], axis=1)
    factors = np.random.default_rng(0).integers(0, 2**64, columns.shape[1], dtype=np.uint64) | np.uint64(1)
    hashed = (columns * factors).sum(axis=1, dtype=np.uint64)
    _, first, key = np.unique(hashed, return_index=True, return_inverse=True)
    assert (columns == columns[first[key]]).all(), "two different routes have one hash"
    return key.astype(np.int64)
