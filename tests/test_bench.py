"""tools/bench.py counts what the model needs, times it, and says where all of the time goes."""

import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from runs import run
from torch.utils.flop_counter import FlopCounterMode

import train_gpt

sys.path.insert(0, str(ROOT / "tools"))
import bench  # noqa: E402

BENCH = str(ROOT / "tools" / "bench.py")
CPU = torch.device("cpu")
LARGE_VOCABULARY = {
    "record": "demo",
    "device": "cpu",
    "model_dim": 64,
    "num_heads": 2,
    "head_dim": 32,
    "num_layers": 4,
    "seq_len": 128,
    "val_seq_len": 128,
    "val_tokens": 1024,
}
LARGE_VOCABULARY = [
    w for name, value in LARGE_VOCABULARY.items() for w in (f"--{name}", str(value))
]


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of torch that wait for each other lose most of their time where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of the command line with everything in it, its report and its folder."""
    folder = tmp_path_factory.mktemp("bench")
    own = ["--json", "--steps", 1, "--micro_batches", 1, "--trace", 2, "--vs", "--num_layers 2"]
    options = {"script": BENCH, "cwd": folder, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
    process = run([*own, *LARGE_VOCABULARY], **options)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout), folder


def made_up(hp, sequences: int = 1) -> torch.Tensor:
    """Tokens (n, T) of several documents."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 500, (sequences, hp.seq_len), generator=generator)
    tokens[:, [0, 37, 300]] = train_gpt.END_OF_TEXT
    return tokens


def counted(work) -> int:
    """Operations of the matrix products in `work`, by torch's own count."""
    with FlopCounterMode(display=False) as counter:
        work()
    counts = counter.get_flop_counts()["Global"]
    return sum(n for op, n in counts.items() if "attention" not in str(op))


@pytest.mark.parametrize("record", train_gpt.RECORDS)
def test_model_flops_are_those_of_the_products_that_run_and_of_the_pairs_in_sight(tiny, record):
    changed = {"seq_len": 384, "vocab_size": 50257, "num_layers": 4}
    layers, rule = train_gpt.RECORDS[record].layers, train_gpt.RECORDS[record].window_rule
    hp = train_gpt.replace(tiny, layers=layers, window_rule=rule, **changed)
    model, tokens, window = train_gpt.build(hp, CPU), made_up(hp), 256
    flops = bench.model_flops(model, tokens, window)

    def forward_and_backward():
        for row in tokens:
            model(row, row, window).backward()

    # The head's gradient is added in place by addmm_, which torch does not count.
    uncounted = 2 * tokens.numel() * model.lm_head.weight.numel()
    assert counted(forward_and_backward) + uncounted == flops["matmul"]

    pairs = 0
    for layer in model.layers:
        size = {"long": window, "short": window // 2}.get(layer.window, 0)
        for row in tokens.tolist():
            document = 0
            for i, token in enumerate(row):
                document = i if token == train_gpt.END_OF_TEXT else document
                for j in range(document, i + 1) if size else ():
                    blocks = i // 128 - j // 128 < size // 128
                    pairs += blocks if rule == "blocks" else i - j < size
    assert flops["attention"] == 12 * hp.num_heads * hp.head_dim * pairs


def test_newton_schulz_flops_are_those_that_a_step_of_the_optimizers_runs(tiny):
    model = train_gpt.build(tiny, CPU)
    optimizers = train_gpt.Optimizers(model, tiny)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    assert counted(lambda: optimizers.step(0)) == bench.newton_schulz_flops(model)


def test_the_parts_sum_to_the_time_of_the_profiled_steps(finished):
    profile = finished[0]["profile"]
    assert sum(profile["parts"].values()) == pytest.approx(profile["ms"], rel=0.01)
    with open(finished[1] / profile["trace"], encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    steps = [e["dur"] / 1e3 for e in events if e["name"] == "step"]
    assert len(steps) == profile["steps"] == 2
    assert sum(steps) / 2 == pytest.approx(profile["ms"], rel=0.01)


def test_with_a_large_vocabulary_most_of_the_time_goes_to_head_and_loss(finished):
    parts = finished[0]["profile"]["parts"]
    busy = ("embedding", "attention", "MLP", "head and loss", "optimizer", "data")
    assert all(parts[part] > 0 for part in busy)
    assert parts["communication"] == parts["GPU idle"] == parts["layers, fused"] == 0
    assert max(parts, key=parts.get) == "head and loss"


def test_backward_calls_count_for_the_part_of_their_forward_calls(finished):
    report, folder = finished
    hp, _ = bench.settings(LARGE_VOCABULARY, 1)
    events = json.loads((folder / report["profile"]["trace"]).read_text())["traceEvents"]
    backward = [e for e in events if e["name"].endswith("evaluate_function: ReluBackward0")]
    moved = sum(e["dur"] for e in backward) / 1e3
    inside = [e for e in events if e["name"] == "ReluBackward0"]
    parts = bench.split_by_part(events, hp)
    without = bench.split_by_part([e for e in events if e not in backward + inside], hp)
    assert moved > 0
    assert parts["MLP"] - without["MLP"] == pytest.approx(moved)
    assert without["other"] - parts["other"] == pytest.approx(moved)


def test_json_has_the_keys_that_the_help_names(finished):
    report, folder = finished
    names = ["machine", "record", "flags", "data", "batch", "windows", "newton_schulz_flops"]
    names += ["ceiling", "memory_gb", "notes", "compiled", "compile_s", "profile", "vs"]
    assert sorted(report) == sorted(names) and all(name in bench.__doc__ for name in names)
    assert report["batch"] == {"sequences": 1, "tokens": 128, "micro_batches": 1}
    assert [w["window"] for w in report["windows"]] == [128, 128, 256]
    for w in report["windows"]:
        assert w["tokens_per_s"] == pytest.approx(128e3 / w["ms"])
        assert w["tflops"] == pytest.approx(sum(w["flops"].values()) / w["ms"] / 1e9)
        assert w["of_ceiling"] == pytest.approx(w["tflops"] / report["ceiling"]["mean"])
    assert [str(p.relative_to(folder)) for p in folder.rglob("*.*")] == [report["profile"]["trace"]]


def test_vs_compares_block_by_block_in_turn(finished):
    report = finished[0]
    assert report["vs"]["flags"] == ["--num_layers", "2"]
    for a, b in zip(report["windows"], report["vs"]["windows"], strict=True):
        ratios = sorted(y / x for x, y in zip(a["blocks"], b["blocks"], strict=True))
        assert len(ratios) == 5 and b["ratio"] == pytest.approx(ratios[2])
        assert b["ratio_range"] == pytest.approx([ratios[0], ratios[-1]])
        assert b["flops"]["matmul"] < a["flops"]["matmul"]


def test_each_run_of_vs_keeps_the_kernels_that_it_chose(flags):
    args, _ = bench.parse_args([])
    one, kernel = bench.Run(flags, args, CPU, compile_times=False), SimpleNamespace(use=False)
    assert [name for name, _ in one.kernels] == list(train_gpt.KERNELS.values())
    one.kernels = [(kernel, True)]
    one.step("first")
    assert kernel.use


def call(name, start, end, thread=1, category="cpu_op", **details):
    times = {"ts": 1000 * start, "dur": 1000 * (end - start)}
    return {"ph": "X", "name": name, "cat": category, "tid": thread, "args": details, **times}


def kernel(name, start, end, correlation):
    return call(name, start, end, 7, "kernel", correlation=correlation)


def test_each_moment_of_a_gpu_counts_for_the_call_that_launched_what_runs(tiny):
    launch = {"category": "cuda_runtime"}
    dims = [[tiny.seq_len, tiny.model_dim], [tiny.model_dim, 4 * tiny.model_dim]]
    trace = [
        call("part:other", 0, 20, category="user_annotation"),
        call("part:data", 0, 1, category="user_annotation"),
        call("part:layers, fused", 1, 5, category="user_annotation"),
        call("CompiledFunction", 1, 5, **{"Sequence number": 3}),
        call("aten::mm", 2, 3, **{"Input Dims": dims}),
        call("cudaLaunchKernel", 2.2, 2.4, correlation=1, **launch),
        call("cuLaunchKernel", 3, 4, correlation=2, **launch),
        call("cuLaunchKernel", 4, 5, correlation=3, **launch),
        call("autograd::engine::evaluate_function: A", 5, 9, thread=2, **{"Sequence number": 3}),
        call("cuLaunchKernel", 6, 7, thread=2, correlation=4, **launch),
        call("part:communication", 7, 8, thread=2, category="user_annotation"),
        call("cudaLaunchKernel", 7, 8, thread=2, correlation=5, **launch),
        kernel("nvjet_hsh_128x256", 3, 6, 1),
        kernel("triton_tem_fused_flex_attention_0", 6, 8, 2),
        kernel("triton_poi_fused_add_mul_1", 8, 9, 3),
        kernel("triton_poi_fused_mul_relu_threshold_backward_2", 9, 10, 4),
        kernel("ncclDevKernel_ReduceScatter", 9.5, 14, 5),
    ]
    parts = bench.split_by_part(trace, tiny)
    expected = {"data": 1, "MLP": 3 + 1, "attention": 2, "layers, fused": 1}
    expected |= {"communication": 4, "GPU idle": 2 + 6}
    assert {part: ms for part, ms in parts.items() if ms} == pytest.approx(expected)


def test_h100s_are_estimated_to_reach_the_published_time():
    for record, published in train_gpt.PUBLISHED.items():
        assert bench.estimate_minutes(record, bench.H100, 8) == pytest.approx(published.minutes)
        slow = {name: rate / 2 for name, rate in bench.H100.items()}
        ratio = bench.estimate_minutes(record, slow, 1) / published.minutes
        assert 8 * 1.9 < ratio < 8 * 2


def test_calibrate_names_all_records_and_estimates_the_demo(capsys):
    bench.main(["--calibrate", "1", "--device", "cpu", "--json"])
    report = json.loads(capsys.readouterr().out)
    rates, estimates = report["rates"], report["estimates"]
    assert list(estimates) == list(train_gpt.RECORDS)
    assert rates["all-reduce GB/s"] is None and rates["memory GB/s"] > 0
    # BENCHMARKS.md: 128 steps of 90 GFLOP, at 60 % of the rate of matmuls.
    seconds = 128 * 0.090 / (0.6 * rates["matmul TFLOP/s"])
    assert estimates["demo"]["here"] == pytest.approx(seconds / 60, rel=0.02)


def test_the_tables_say_what_was_measured_and_train_gpt_is_as_it_was(flags, capsys, tmp_path):
    places = train_gpt.lookup, train_gpt.GPT.hidden, train_gpt.Optimizers.step
    bench.main(["--steps", "1", "--micro_batches", "1", *flags])
    words = "ms/step tokens/s ceiling Newton-Schulz memory GB not compiled attention sum profiled"
    text = capsys.readouterr().out
    assert all(word in text for word in words.split())
    assert places == (train_gpt.lookup, train_gpt.GPT.hidden, train_gpt.Optimizers.step)
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    "words", ["--no_such 1", "--steps 0", "--vs ' --calibrate 1", "--resume auto", "--eval x"]
)
def test_a_users_mistake_is_one_line_and_status_2(words, flags, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main([*flags, *words.split()])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and len(err.splitlines()) == 1 and err.startswith("bench.py: error")


def test_two_ranks_share_a_step_and_the_first_prints(flags, tmp_path):
    process = run(["--json", "--steps", 1, "--micro_batches", 1, *flags], ranks=2, script=BENCH)
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert report["machine"]["processes"] == 2 and report["profile"]["parts"]["communication"] > 0
    assert report["batch"] == {"sequences": 2, "tokens": 256, "micro_batches": 1}
    hp, _ = bench.settings(flags, 0)
    matrices = sum(p.numel() for p in train_gpt.GPT(hp).blocks.parameters() if p.ndim > 1)
    expected = 6 * 256 * (matrices + 512 * 64)  # of both ranks
    assert all(w["flops"]["matmul"] == expected for w in report["windows"])
    assert not (tmp_path / "logs").exists()
