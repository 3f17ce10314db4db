"""The benchmark of the LM head on a CPU; `tests/kernels/interpreted_logprob.py` runs it in Triton's interpreter."""

from unittest import mock

import pytest
import torch

from benchmarks import clock, head
from benchmarks.report import page
from cp_engine.kernels.logprob import api

CPU = torch.device("cpu")
TOY = {name: head.Workload(70, 90, 16, 50, trained) for name, trained in (("toy_frozen", False), ("toy", True))}


@pytest.fixture(autouse=True)
def short():
    with mock.patch.dict(head.WORKLOADS, TOY), mock.patch.multiple(clock, REPEATS=1, FEWEST=1, WARM_UPS=0):
        yield


@pytest.mark.parametrize("name", TOY)
def test_records(name):
    (record,) = head.run_workload(name, ["reference"], [1], CPU, torch.float32)
    assert record["max_err"] < 1e-5 and record["gain"] == 1.0 and record["over_products"] > 0
    assert ("dweight" in record["errors"]) == TOY[name].trained
    text = page([record | {"commit": "c", "versions": {}, "card": "a card", "command": "x", "date": "d"}])
    assert f"| {name} | reference | 70 | 16 | 50 |" in text and "## LM head" in text


@pytest.mark.parametrize("by", [0.03, float("nan")])
def test_wrong_values_get_no_gain(by):
    original = api.logits_to_edges

    def spoilt(*args):
        log_prob, entropy = original(*args)
        return log_prob, entropy * (1 + by if entropy.dtype == torch.float32 else 1)

    with mock.patch.object(api, "logits_to_edges", spoilt):
        (record,) = head.run_workload("toy", ["reference"], [1], CPU, torch.float32)
    assert record["gain"] is None and record["over_products"] is None


def test_chunk_sizes_are_methods_of_their_own():
    options = head.arguments_of(["--chunk-mib", "256", "1024"])
    assert options.chunk_mib == [256, 1024] and head.arguments_of([]).chunk_mib == [1024]
