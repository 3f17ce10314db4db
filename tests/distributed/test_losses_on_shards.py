"""Every loss with every aggregation while FSDP2 holds the weights, over cut packs: the flat rows' gradients."""

import itertools

from cp_engine.losses.settings import AGGREGATIONS, LOSSES
from cp_engine.verify.run import FlatRun
from tests.distributed.engine_cases import flat_oracle, gradients
from tests.distributed.test_engines import judged
from tests.ranks import run_ranks

SECTIONS = {"parallel": {"dp": 1, "cp": 2}, "engine": {"name": "fsdp2"}}
Case = tuple[dict[str, str], FlatRun]


def all_gradients(cases: list[Case]) -> list[tuple]:
    return [gradients(flat, fields, SECTIONS) for fields, flat in cases]


def test_every_loss_with_every_aggregation():
    fields = [
        {"model": "tiny-qwen3", "loss": loss, "aggregation": aggregation}
        for loss, aggregation in itertools.product(LOSSES, AGGREGATIONS)
    ]
    cases = [(of_case, flat_oracle(**of_case)) for of_case in fields]
    assert all(len(flat.step.packs) > 1 for _, flat in cases)
    of_ranks = run_ranks(2, all_gradients, cases)
    for (_, flat), *results in zip(cases, *of_ranks, strict=True):
        judged(results, flat)
