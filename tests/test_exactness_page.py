"""The recorded exactness of losses is whole, within its bound, and what the page says."""

import itertools

import pytest

from benchmarks import exactness, exactness_losses
from cp_engine.losses.settings import AGGREGATIONS, LOSSES


def test_every_loss_with_every_aggregation_is_recorded_on_packs_that_were_cut():
    recorded = {tuple(row[key] for key in exactness_losses.CASE): row for row in exactness_losses.read()}
    cases = itertools.product(exactness_losses.MODELS, LOSSES, AGGREGATIONS, exactness_losses.TREE_RUNS)
    assert recorded.keys() == {(*case, engine, cp) for *case, (engine, cp) in cases}
    for row in recorded.values():
        assert row["ok"] and row["dtype"] == "float64" and row["packs"] > 1 and row["bound"] == 1e-10
        assert max(row[key] for key in ("max_logprob_err", "loss_err", "max_grad_err")) <= 1e-10


def test_the_page_holds_the_recorded_results():
    rows = exactness.read_results(exactness.RESULTS)
    assert exactness.PAGE.read_text() == exactness.page(rows) + exactness_losses.section(exactness_losses.read())


@pytest.mark.parametrize("ok", [True, False])
def test_a_run_that_failed_shows(ok):
    first, *others = exactness_losses.read()
    table = exactness_losses.table([first | {"ok": ok, "max_grad_err": 1e-14 if ok else 3e-5}, *others])
    assert ("11 of 12" in table and "3.0e-05" in table) == (not ok)
