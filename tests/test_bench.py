"""tools/bench.py counts what a step needs, times it, in turn with another one, and says so."""

import contextlib
import importlib
import json
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import bench
import train_gpt
from conftest import at_window, shard
from runs import Program, console_of

CPU = torch.device("cpu")
RATE = 0.05  # TFLOP/s, in place of a measured ceiling


@pytest.mark.parametrize("record", ["2024-11-24_WindowWarmup", "2025-01-26_BatchSize"])
def test_model_flops_are_those_of_the_products_that_run_and_of_the_pairs_in_sight(tiny, record):
    layers, rule = train_gpt.RECORDS[record].layers, train_gpt.RECORDS[record].window_rule
    hp = replace(tiny, seq_len=384, layers=layers, window_rule=rule, end_of_text=490)
    model = train_gpt.build(train_gpt.Run, hp, CPU)
    now = at_window(256, hp)
    tokens = torch.randint(0, 500, (1, 384), generator=torch.Generator().manual_seed(0))
    tokens[:, [0, 37, 300]] = hp.end_of_text
    groups = train_gpt.Optimizers.parameter_groups(model, hp)
    matmul, attention = bench.model_flops(model, groups, tokens, now)
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = contextlib.nullcontext()  # it does not take what Head.loss does
    counter.mod_tracker.parents = {"Global"}
    with counter:
        model(tokens[0], tokens[0], now).backward()
    counts = counter.get_flop_counts()["Global"].items()
    assert matmul == sum(n for op, n in counts if "attention" not in str(op))

    pairs = 0
    for layer in model.layers:
        if layer.window == "none":
            continue
        size = 256 if layer.window == "long" else 128
        document = 0
        for i, token in enumerate(tokens[0].tolist()):
            document = i if token == hp.end_of_text else document
            for j in range(document, i + 1):
                blocks = i // 128 - j // 128 < size // 128
                pairs += blocks if rule == "blocks" else i - j < size
    assert attention == 12 * hp.num_heads * hp.head_dim * pairs


def test_runs_take_turns_and_rates_are_those_of_their_times(tmp_path, monkeypatch):
    shard(tmp_path / "shard", np.arange(9000) % 500)
    own = "--steps 5 --trace 2 --batch_seqs 1"
    sizes = "--model_dim 32 --num_heads 2 --head_dim 16 --seq_len 128 --val_seq_len 128"
    sizes += " --vocab_size 512 --end_of_text 511"
    flags = f"{own} --record demo --device cpu {sizes} --train_files shard"
    monkeypatch.setattr(bench, "matmul_tflops", lambda *_: RATE)
    made, step_of = [], bench.Timed.step

    def step(run, number):
        made.append(run.hp.num_layers)
        return step_of(run, number)

    monkeypatch.setattr(bench.Timed, "step", step)
    found, windows_of = [], bench.windows_of
    monkeypatch.setattr(bench, "windows_of", lambda *a: found.append(windows_of(*a)) or found[-1])
    report = console_of([*flags.split(), "--vs", "--num_layers 2"], tmp_path, bench.main)
    assert made == 18 * [4, 2] + 2 * [4]  # the last ones are traced
    assert [a["step"] for a, _ in found] == [0, 160, 319]
    assert [b["window"] for _, b in found] == [128, 128, 256]
    for a, b in found:
        for w in (a, b):
            assert w["ms_per_step"] == sorted(w["blocks"])[2]
            assert w["tokens_per_s"] == pytest.approx(128e3 / w["ms_per_step"])
            rate = 1e3 * (w["matmul_tflop"] + w["attention_tflop"]) / w["ms_per_step"]
            assert w["of_ceiling"] == pytest.approx(rate / RATE)
        ratios = sorted(m / n for m, n in zip(b["blocks"], a["blocks"], strict=True))
        assert [b["lowest"], b["ratio"], b["highest"]] == pytest.approx(ratios[::2])
        assert b["matmul_tflop"] < a["matmul_tflop"]
        assert f" {bench.show(b['ratio'])} " in report

    (trace,) = (tmp_path / "logs").glob("trace_*.json")
    events = json.loads(trace.read_text("utf-8"))["traceEvents"]
    assert sum(e["name"] == "step" and e.get("cat") == "user_annotation" for e in events) == 2


def bench_with(words: list[str]) -> None:
    """Call bench.py with a given rate: two ranks on one core would measure it slowly."""
    importlib.reload(bench)  # it reads its rank when it is imported
    bench.matmul_tflops = lambda *_: RATE
    bench.main(words)


def test_two_ranks_share_a_step_and_the_first_prints(flags, tmp_path):
    fork = "train_gpt_2026.py --record 2025-08-23_SparseAttnGate --align_to_documents off"
    words = ["--steps", "5", *flags, "--batch_seqs", "2", "--vs", fork]
    program = Program(words, ranks=2, work=bench_with)
    assert program.end() == [0, 0], program.text("err")
    report = program.text("out")
    assert report.startswith("machine     2 x CPU") and not program.text("out", 1)
    hp, _ = train_gpt.parse_args(flags, train_gpt.Run)
    matrices = sum(p.numel() for p in train_gpt.GPT(hp).blocks.parameters() if p.ndim > 1)
    scripts = re.findall(r"(?m)^script +(\S+)$", report)
    assert scripts == ["train_gpt.py", "forks/train_gpt_2026.py"]
    (row, *_) = re.findall(r"(?m)^ *0 .*$", report)
    near = partial(pytest.approx, rel=2e-3)  # four digits are printed
    numbers = map(float, row.split()[3:10])
    ms, tokens, matmul, _, tflop, _, of_ceiling = numbers
    assert matmul == near(6e-12 * 256 * (matrices + 512 * 64))  # of both
    assert of_ceiling == near(tflop / RATE / 2)
    assert tokens == near(256e3 / ms)
    assert not (tmp_path / "logs").exists()
