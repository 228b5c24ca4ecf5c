"""All records, with and without kernels, compiled for cards from 24 to 180 GB."""

import pytest
from test_gpu_code import check, rows_of

from train_gpt import RECORDS

CARDS = "h100", "a100", "4090", "3090", "5090", "b200"


@pytest.mark.parametrize("kernels", ["off", "on"])
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("record", [name for name in RECORDS if name != "demo"])
def test_a_card_could_run_a_record(record, card, kernels):
    assert check(card, rows_of(card, record, kernels, "layer", "loss", "muon"))
