"""tools/bench.py counts what a step needs, times it, in turn with another one, and says so."""

import json
from dataclasses import replace
from types import SimpleNamespace

import bench
import numpy as np
import pytest
import torch
from conftest import ROOT, at_window, shard
from runs import Program, console_of, error_of
from test_alone import as_script
from torch.utils.flop_counter import FlopCounterMode

import train_gpt

CPU = torch.device("cpu")
OWN = ROOT / "train_gpt.py"
RATE = 0.05  # TFLOP/s, in place of a measured ceiling


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the report of a run with everything in it, and the folder in which it ran."""
    folder = tmp_path_factory.mktemp("bench")
    shard(folder / "shard", np.arange(9000) % 500)
    own = "--json --steps 1 --micro_batches 1 --trace 2"
    sizes = "--model_dim 32 --num_heads 2 --head_dim 16 --seq_len 128 --val_seq_len 128"
    flags = f"{own} --record demo --device cpu {sizes} --vocab_size 500 --train_files shard"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "matmul_tflops", lambda *_: RATE)
        console = console_of([*flags.split(), "--vs", "--num_layers 2"], folder, bench.main)
    return json.loads(console), folder


def counted(work) -> int:
    """Return the operations of the matrix products in `work`, by torch's own count."""
    with FlopCounterMode(display=False) as counter:
        work()
    counts = counter.get_flop_counts()["Global"]
    return sum(n for op, n in counts.items() if "attention" not in str(op))


@pytest.mark.parametrize("record", ["2024-11-24_WindowWarmup", "2025-01-26_BatchSize"])
def test_model_flops_are_those_of_the_products_that_run_and_of_the_pairs_in_sight(tiny, record):
    rule = train_gpt.RECORDS[record].window_rule
    layers = train_gpt.RECORDS[record].layers
    hp = replace(tiny, seq_len=384, vocab_size=50257, layers=layers, window_rule=rule)
    model = train_gpt.build(train_gpt.Run, hp, CPU)
    window = 256
    now = at_window(window, hp)
    tokens = torch.randint(0, 500, (1, 384), generator=torch.Generator().manual_seed(0))
    tokens[:, [0, 37, 300]] = train_gpt.END_OF_TEXT
    matmul, attention = bench.model_flops(train_gpt.Run, model, tokens, now)
    # The head's gradient is added in place by addmm_, which torch does not count.
    uncounted = 2 * 384 * model.lm_head.weight.numel()
    assert matmul == uncounted + counted(lambda: model(tokens[0], tokens[0], now).backward())

    pairs = 0
    for layer in model.layers:
        if layer.window == "none":
            continue
        size = window if layer.window == "long" else window // 2
        document = 0
        for i, token in enumerate(tokens[0].tolist()):
            document = i if token == train_gpt.END_OF_TEXT else document
            for j in range(document, i + 1):
                blocks = i // 128 - j // 128 < size // 128
                pairs += blocks if rule == "blocks" else i - j < size
    assert attention == 12 * hp.num_heads * hp.head_dim * pairs


def test_newton_schulz_flops_are_those_that_a_step_of_the_optimizers_runs(tiny):
    model = train_gpt.build(train_gpt.Run, tiny, CPU)
    optimizers = train_gpt.Optimizers(model, tiny)
    for p in model.parameters():
        train_gpt.gradient_of(p).fill_(1.0)
    optimizers.collect()
    step = counted(lambda: optimizers.step(train_gpt.Moment(0, tiny)))
    assert step == bench.newton_schulz_flops(train_gpt.Run, model)


def test_rates_are_those_of_the_times(finished):
    report, _ = finished
    assert [w["step"] for w in report["windows"]] == [0, 64, 127]
    assert [w["window"] for w in report["windows"]] == [128, 128, 256]
    for w in report["windows"]:
        assert w["ms_per_step"] == w["ms_per_micro_batch"] == sorted(w["blocks"])[2]
        assert w["tokens_per_s"] == pytest.approx(128e3 / w["ms_per_step"])
        rate = 1e3 * (w["matmul_tflop"] + w["attention_tflop"]) / w["ms_per_step"]
        assert w["tflop_per_s"] == pytest.approx(rate)
        assert w["of_ceiling"] == pytest.approx(rate / RATE)


def test_vs_compares_block_by_block(finished):
    report = finished[0]
    assert report["vs"]["flags"] == f"{report['flags']} --num_layers 2"
    for a, b in zip(report["windows"], report["vs"]["windows"], strict=True):
        ratios = sorted(y / x for x, y in zip(a["blocks"], b["blocks"], strict=True))
        assert len(ratios) == 5 and b["ratio"] == pytest.approx(ratios[2])
        assert [b["lowest"], b["highest"]] == pytest.approx([ratios[0], ratios[-1]])
        assert b["matmul_tflop"] < a["matmul_tflop"] and "ratio" not in a


def test_runs_take_turns_at_the_same_moment():
    made = []

    def fake(name, steps):
        made_row = lambda step, blocks, *_: {"blocks": len(blocks)}  # noqa: E731
        a_step = lambda step: made.append(f"{name}{step}")  # noqa: E731
        report = {"windows": []}
        return SimpleNamespace(steps=steps, device=CPU, step=a_step, row=made_row, report=report)

    runs = fake("A", (0, 3, 5)), fake("B", (0, 6, 9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "matmul_tflops", lambda *_: RATE)
        bench.time_in_turn(runs, 10)
    once = lambda a, b: [a, b] + 5 * [a, a, b, b]  # noqa: E731
    assert made == once("A0", "B0") + once("A3", "B6") + once("A5", "B9")
    assert [row["blocks"] for run in runs for row in run.report["windows"]] == [5] * 6


def test_trace_is_one_file_of_so_many_steps(finished):
    report, folder = finished
    trace = report["trace"]
    assert [str(p.relative_to(folder)) for p in folder.rglob("*.*")] == [trace["path"]]
    events = json.loads((folder / trace["path"]).read_text("utf-8"))["traceEvents"]
    assert sum(e["name"] == "step" and e.get("cat") == "user_annotation" for e in events) == 2


def test_each_run_keeps_the_kernels_that_it_chose(flags):
    one, other = (bench.Timed(bench.configuration(OWN, flags), CPU) for _ in range(2))
    calls = []

    def twin(x, w_in, w_out):
        calls.append(x)
        return (x @ w_in.T).relu().square() @ w_out.T

    assert one.kernels == other.kernels == {}  # on a CPU
    one.kernels = {"relu2_mlp": twin}
    other.step(0)
    one.step(0)
    assert len(calls) == one.hp.batch_seqs * one.hp.num_layers
    other.step(0)
    assert len(calls) == one.hp.batch_seqs * one.hp.num_layers


def test_calibrate_prints_rates_and_estimates_the_demo(capsys):
    bench.main(["--calibrate", "1", "--device", "cpu"])
    text = capsys.readouterr().out
    found = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert float(found["memory GB/s"][3].strip(",")) > 0 and "all-reduce" not in text
    rate = float(found["matmul TFLOP/s"][3].strip(","))
    assert "estimated minutes" in text
    seconds = bench.DEMO_TFLOP / rate
    assert float(found["demo"][-1]) == pytest.approx(seconds / 60, rel=0.02)


def test_the_demos_operations_are_what_calibrate_takes_them_for():
    hp = train_gpt.RECORDS["demo"]
    model = train_gpt.GPT(hp)
    planned = train_gpt.plan_batches(hp.train_files, hp.seq_len, hp.batch_seqs, hp.num_iterations)
    flops = 0
    for step, (inputs, _) in enumerate(train_gpt.distributed_data_generator(planned, 0, 1, CPU)):
        flops += sum(bench.model_flops(train_gpt.Run, model, inputs, train_gpt.Moment(step, hp)))
    assert pytest.approx(flops / 0.6e12, rel=0.01) == bench.DEMO_TFLOP


def test_a_users_mistake_is_one_line_and_status_1(capsys):
    words = ["--record", "demo", "--device", "cpu", "--vs=--device=cuda"]
    status, err = error_of(words, capsys, bench.main)
    assert status == 1 and err.startswith("bench.py: error: --vs cannot change --device")


def test_two_ranks_share_a_step_and_the_first_prints(flags, tmp_path):
    script = tmp_path / "two_ranks.py"  # the rate is given: two ranks on one core measure it slowly
    script.write_text(f"import bench; bench.matmul_tflops = lambda *_: {RATE}; bench.main()")
    frontier = "train_gpt_2026.py --record 2025-08-23_SparseAttnGate --align_to_documents off"
    words = ["--json", "--steps", "1", "--micro_batches", "1", *flags, "--vs", frontier]
    more = [str(script), [str(ROOT / "tools")]]
    program = Program(words, ranks=2, work=as_script, more=more)
    assert program.end() == [0, 0], program.text("err")
    report = json.loads(program.text("out"))
    assert report["machine"].startswith("2 x CPU") and not program.text("out", 1)
    hp, _ = train_gpt.parse_args(flags, train_gpt.Run)
    matrices = sum(p.numel() for p in train_gpt.GPT(hp).blocks.parameters() if p.ndim > 1)
    for w in report["windows"]:
        assert w["matmul_tflop"] == pytest.approx(6e-12 * 256 * (matrices + 512 * 64))  # of both
        assert w["of_ceiling"] == pytest.approx(w["tflop_per_s"] / RATE / 2)
        assert w["tokens_per_s"] == pytest.approx(256e3 / w["ms_per_step"])
    assert not (tmp_path / "logs").exists()

    optimizers = train_gpt.Optimizers(train_gpt.GPT(hp), hp, 0, 2)
    expected = 1  # of the loss
    for group, rows in optimizers.groups:
        expected += len(rows.weights)  # gradients are summed by message
        if group.row_ndim:  # then weights are collected so, or Muon's updates at once
            expected += 1 if group.name == "muon" else len(rows.weights)
    assert [w["collectives"] for w in report["windows"]] == [expected] * 3
