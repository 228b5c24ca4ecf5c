"""All records, with and without kernels, compiled for cards from 24 to 180 GB."""

import pytest

import test_gpu_code
import train_gpt
import train_gpt_2026
import train_gpt_2026_07
import train_gpt_2026_08
from test_gpu_code import check, rows_of

SCRIPTS = train_gpt, train_gpt_2026, train_gpt_2026_07, train_gpt_2026_08
RECORDS = [name for script in SCRIPTS for name in script.RECORDS]
# Bytes of registers that kernels of the layers' backward pass spill, at most.
SPILLED = {
    "h100": test_gpu_code.SPILLED["h100"],
    "5090": {
        r"layer backward triton_tem_\w*flex_attention_backward": 48,
        "paired layer backward triton_per_": 344,
    },
}


# And with narrow heads: attention with q and k of 64 channels and values of 128.
NARROW = {
    "h100": {"paired layer triton_tem_": 168},
    "a100": {r"layer( with xsa)?( backward)? triton_tem_": 4880},
    "4090": {r"layer( with xsa)?( backward)? triton_tem_": 368},
    "3090": {r"layer( with xsa)?( backward)? triton_tem_": 368},
    "5090": {r"layer( with xsa)?( backward)? triton_tem_": 408},
    "b200": {r"layer( with xsa)? triton_tem_": 944, "layer( with xsa)? backward relu2_": 56},
}


@pytest.mark.parametrize("kernels", ["off", "on"])
@pytest.mark.parametrize("card", ["h100", "a100", "4090", "3090", "5090", "b200"])
@pytest.mark.parametrize("record", [name for name in RECORDS if name != "demo"])
def test_a_card_could_run_a_record(record, card, kernels, monkeypatch):
    spilled = SPILLED.get(card, {})
    if record in train_gpt_2026_08.RECORDS:
        spilled = spilled | NARROW.get(card, {})
    monkeypatch.setattr(test_gpu_code, "SPILLED", {card: spilled})
    names = check(card, rows_of(card, record, kernels, "layer", "loss", "muon"))
    assert ("softcap_grad_kernel_0" in names) == (kernels == "on")
