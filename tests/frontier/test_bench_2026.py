"""bench.py on the frontier's models."""

import itertools

import pytest
import torch

import bench
from frontier.small_runs import ROW, SIZES, C, D
from test_sample import END, at_windows, model  # noqa: F401
from train_gpt import HERE
from train_gpt_2026 import Optimizers


@torch.no_grad()
@pytest.mark.parametrize("model", [C, D], indirect=True)
def test_bench_counts_pairs_of_a_query_and_a_key_under_each_layers_window(model):  # noqa: F811
    """One by one. Paired heads are half as many, and see twice as many positions; each has
    12 * head_dim operations, forward and backward."""
    tokens = torch.randint(END, (2, 384), generator=torch.Generator().manual_seed(0)).int()
    tokens[0, [70, 71, 300]] = END
    expected = 0
    for row, layer in itertools.product(tokens.tolist(), model.layers):
        if layer.window == "none":
            continue
        places = 2 if layer.paired else 1
        window = 256 if layer.window == "long" else 128
        start = 0
        for i in range(len(row) * places):
            if i % places == 0 and row[i // places] == END:
                start = i
            expected += (i - max(start, i - window) + 1) * 4 // places * 12 * 8
    now = at_windows(model, 256)
    groups = Optimizers.parameter_groups(model, model.hp)
    assert bench.model_flops(model, groups, tokens, now)[1] == expected


def test_a_record_without_its_data_is_timed_on_the_sample_and_finds_its_documents():
    """Its sequences begin with them."""
    path, words = HERE / "forks/train_gpt_2026.py", f"{ROW[D]} {SIZES} --train_files none"
    run = bench.Timed(path, words.split(), torch.device("cpu"))
    assert (run.step(0)[:, 0] == 4095).all()
