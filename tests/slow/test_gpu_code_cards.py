"""All records, with and without kernels and FP8, compiled for cards from 24 to 80 GB."""

import pytest
from test_gpu_code import check, rows_of

from train_gpt import RECORDS

CARDS = "h100", "a100", "4090", "3090", "5090", "b200"


@pytest.mark.parametrize("kernels", ["off", "on"])
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("record", [name for name in RECORDS if name != "demo"])
def test_a_card_could_run_a_record(record, card, kernels):
    assert check(card, rows_of(card, record, kernels, "layer", "loss", "muon"))


@pytest.mark.parametrize("kernels", ["off", "on"])
@pytest.mark.parametrize("card", CARDS)
def test_a_card_could_run_the_record_without_fp8(card, kernels):
    rows = rows_of(card, "2025-01-26_BatchSize", kernels, "loss", "--no_fp8")
    assert "head in float8" not in {row["graph"] for row in rows} and check(card, rows)
