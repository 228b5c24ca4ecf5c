"""Whole runs on tiny models: what they print, log and learn."""

import ctypes
import gc
import math
import os
import re
import resource
import sys
import time
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import small_fork
import train_gpt
import train_gpt_2026
from logfile import read_log
from runs import SCRIPT, STEP, Program, before_step, error_of, rows, run, val_losses
from train_gpt import HERE, RECORDS, main

RULE = "=" * 100


@pytest.fixture
def flags(flags) -> list[str]:
    return [*flags, "--batch_seqs", "2", "--val_tokens", "512", "--run_id", "it"]


def test_log_holds_source_versions_machine_settings_and_the_communitys_lines(
    flags, tmp_path, capsys, monkeypatch
):
    """And a row for each step says what the console says. The machine is the CPU where nvidia-smi
    fails. A kill left a part of a header."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    flags += ["--num_iterations", "27", "--val_loss_every", "10", "--grad_clip", "100"]
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/it.txt").write_text(Path(SCRIPT).read_text("utf-8")[:999])
    main([*flags, "--resume", "on"])
    console = capsys.readouterr().out
    log = (tmp_path / "logs/it.txt").read_text("utf-8")
    source, versions, machine, settings, *others, results = re.split(f"(?m)^{RULE}\n", log)
    assert source == Path(SCRIPT).read_text("utf-8") + "\n"  # the started script alone
    assert "gpu_kernels.py:\n" + (HERE / "gpu_kernels.py").read_text("utf-8") + "\n" in others
    assert str(os.cpu_count()) in machine
    assert f"Python {sys.version}" in versions and f"torch {torch.__version__}" in versions
    assert "\nmodel_dim: 64\n" in settings and "\nadam_betas: 0.8 0.95\n" in settings
    hp, _ = train_gpt.parse_args(flags, train_gpt.Run)
    found = rows(tmp_path / "logs/it.jsonl")
    steps = found[1:]
    validated = {row["step"]: round(row["val_loss"], 5) for row in found if "val_loss" in row}
    said = [(str(row["step"]), f"{row['train_loss']:.4f}") for row in steps]
    for text in (console, results):
        counts = [(int(m[1]), int(m[2])) for m in STEP.finditer(text)]
        assert counts == [(step, 27) for step in range(1, 28)]
        assert val_losses(text) == validated and list(validated) == [0, 10, 20, 27]
        assert re.findall(r"^step:(\d+)/27 train_time.* train_loss:(\S+)$", text, re.M) == said
    for step, row in enumerate(steps):
        now = vars(train_gpt.Moment(step, hp)) | {"step": step + 1}
        assert row.items() >= now.items()
        others = {"train_loss", "ms", "tokens_per_s", "grad_norm"}
        assert row.keys() - {"val_loss"} == now.keys() | others
    assert steps[0]["train_loss"] == pytest.approx(math.log(512), abs=1e-3)  # the head is zero
    assert validated[0] == pytest.approx(math.log(512), abs=1e-4)
    assert steps[26]["train_loss"] < 5.5

    status, err = error_of(flags, capsys)
    assert status == 1 and "logs/it.txt exists: choose another --run_id" in err
    assert (tmp_path / "logs/it.txt").read_text("utf-8") == log


EDITED = """from pathlib import Path

import mylib.opt
import train_gpt as t


class GPT(t.GPT):
    def __init__(self, hp):
        super().__init__(hp)
        for file in (__file__, mylib.opt.__file__):
            Path(file).write_text("another text")


class Run(t.Run):
    GPT = GPT


t.main(run=Run)
"""


def test_the_log_holds_sources_as_they_were_at_the_start_also_of_packages(flags, tmp_path):
    Path("my_fork.py").write_text(EDITED)
    Path("mylib").mkdir()
    Path("mylib/opt.py").write_text("RATE = 0.05\n")
    done = run(flags, script=tmp_path / "my_fork.py")
    assert done.returncode == 0, done.stderr
    log = read_log(Path("logs/it.txt"))
    assert Path("my_fork.py").read_text() == "another text" and log.source == EDITED.strip()
    assert log.files["mylib/opt.py"].strip() == "RATE = 0.05" and "train_gpt.py" in log.files


def test_what_a_step_returns_is_in_its_row_and_a_tensor_of_a_moment_is_not(
    flags, capsys, monkeypatch
):
    step_of = train_gpt.train_step

    def with_norm(model, optimizers, inputs, targets, now, **options):
        results = step_of(model, optimizers, inputs, targets, now, **options)
        return results | {"head_norm": model.lm_head.weight.detach().norm()}

    monkeypatch.setattr(train_gpt, "train_step", with_norm)
    main([*flags, "--num_iterations", "2"])
    norms = [row["head_norm"] for row in rows(Path("logs/it.jsonl"))[1:]]
    saved = train_gpt.load_checkpoint("logs/it/state_step000002.pt", train_gpt.Run)
    weight = saved["model"]["lm_head.weight"].double()
    assert norms[0] > 0 and norms[1] == pytest.approx(weight.norm().item(), rel=1e-6)

    class Moment(train_gpt.Moment):
        def __init__(self, step, hp):
            super().__init__(step, hp)
            self.norm = torch.ones(())

    fork = type("Run", (train_gpt.Run,), {"Moment": Moment})
    status, err = error_of([*flags, "--run_id", "other"], capsys, partial(main, run=fork))
    assert status == 1 and "tensors of a step are returned by train_step" in err


def test_the_clock_counts_training_alone(flags, tmp_path, capsys, monkeypatch):
    """10 ms a step, 5 s a validation."""
    now = [0.0]

    def taking(seconds, function):
        def call(*arguments, **options):
            now[0] += seconds
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(train_gpt, "train_step", taking(0.010, train_gpt.train_step))
    monkeypatch.setattr(train_gpt, "evaluate", taking(5, train_gpt.evaluate))
    main([*flags, "--save_every", "3", "--num_iterations", "7", "--keep", "2"])
    out = capsys.readouterr().out
    times = {int(m[1]): (int(m[3]), float(m[4])) for m in STEP.finditer(out)}
    assert times == {step: (10 * step, 10.0) for step in range(1, 8)}
    validated = re.findall(r"step:(\d)/7 val_loss:\S+ train_time:(\d+)ms", out)
    assert validated == [("0", "0"), ("2", "20"), ("4", "40"), ("6", "60"), ("7", "70")]
    found = rows(tmp_path / "logs/it.jsonl")[1:]
    assert [row["ms"] for row in found] == pytest.approx([10.0] * 7)
    assert [row["tokens_per_s"] for row in found] == [2 * 128 * 100] * 7

    (tmp_path / "logs/it/state_step000007.pt").unlink()
    resumed = (tmp_path / "logs/it/state_step000006.pt").stat()
    main([*flags, "--save_every", "3", "--num_iterations", "7", "--resume", "on"])
    assert (tmp_path / "logs/it/state_step000006.pt").stat().st_ino == resumed.st_ino
    validated = re.findall(r"step:(\d)/7 val_loss:\S+ train_time:(\d+)ms", capsys.readouterr().out)
    assert validated == [("6", "60"), ("7", "70")]


@pytest.mark.parametrize("record", [name for name in RECORDS if name != "demo"])
def test_each_record_trains_on_the_sample_at_a_reduced_size(record, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = ["--train_files", f"{HERE}/data/kjv_train_*.bin"]
    files += ["--val_files", f"{HERE}/data/kjv_val_*.bin"]
    flags = f"--record {record} --vocab_size 4096 --end_of_text 4095 --val_loss_every 4"
    flags += " --epochs 0 --device cpu --num_layers 4 --model_dim 32 --num_heads 1 --head_dim 32"
    flags += " --batch_seqs 2 --seq_len 128 --val_seq_len 256 --val_tokens 256"
    flags += " --num_iterations 8 --keep 0"
    # GPT-2 medium's own rates are half as large.
    flags += " --head_lr 0.008 --embed_lr 0.6 --scalar_lr 0.04 --muon_lr 0.05"
    main([*flags.split(), *files])
    losses = val_losses(capsys.readouterr().out)
    assert losses[0] == round(math.log(4096), 5) and losses[4] < 8.1 and losses[8] < 7.5
    assert not list(tmp_path.glob("logs/*/*"))


@pytest.mark.parametrize(
    ("run", "first", "last"), [(train_gpt.Run, 8.31777, 7.9), (train_gpt_2026.Run, 8.3177, 7.5)]
)
def test_without_flags_and_without_a_gpu_the_demo_trains_on_the_sample(
    run, first, last, tmp_path, capsys, monkeypatch
):
    """All settings are its own but the width and the number of steps. The fork's tied head does not
    begin at zero."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = "--model_dim 32 --head_dim 16 --num_iterations 8 --keep 0 --val_tokens 1024"
    main(words.split(), run)
    console = capsys.readouterr().out
    losses = val_losses(console)
    assert console.startswith("record demo --") and list(losses) == [0, 8]
    assert losses[0] == pytest.approx(first, abs=0.01 if run is train_gpt_2026.Run else 0)
    assert losses[8] < last


@pytest.mark.parametrize(
    ("run", "words", "record"),
    [
        (train_gpt.Run, "--help", "demo"),
        (train_gpt.Run, "--help --record medium", "medium_2025-01-18"),
        (small_fork.Run, "--help", "demo"),
        (train_gpt_2026.Run, "--record 2026-03 -h", "2026-03-06_SimplifyHC"),
    ],
)
def test_every_setting_is_a_flag_with_a_help_text(run, words, record, capsys, monkeypatch):
    """It has the values of the record that the other flags would train."""
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        main(words.split(), run)
    assert stop.value.code == 0
    flags = dict(re.findall(r"(?ms)^  --(\w+) (.*?)\n(?=  --|\Z)", capsys.readouterr().out))
    default = run.records[record]
    assert flags.keys() == {"record", *vars(default)}
    assert ", ".join(run.records) in flags["record"]
    for name, value in vars(default).items():
        shown = re.escape(f"[{train_gpt.show(value)}]")
        assert re.search(rf" [a-z0-9Y].* {shown}$", flags[name]), name


def counting_page_faults(words: list[str]) -> None:
    """Run main, and write how many page faults there were before two of its steps."""

    def write() -> None:
        print("faults", resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

    before_step(2, write)
    before_step(6, write)
    main(words)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no glibc")
def test_the_memory_of_a_step_serves_the_next_ones(flags):
    """The page faults of four steps are 12,600, and 264,000 if glibc gives back what is freed."""
    flags += ["--vocab_size", "50257", "--end_of_text", "50256"]
    flags += ["--num_iterations", "7", "--val_loss_every", "0"]
    program = Program([*flags, "--keep", "0"], work=counting_page_faults)
    assert program.end() == [0], program.text("err")
    before, after = (int(n) for n in re.findall(r"faults (\d+)", program.text("out")))
    assert after - before < 60_000


def test_a_model_trains_again_after_a_validation(tiny):
    """In training, forks have more targets, and heads are in FP8."""
    model, tokens = train_gpt.GPT(tiny), torch.arange(tiny.seq_len)[None]
    now = train_gpt.Moment(0, tiny)
    train_gpt.evaluate(model, (tokens.int(), tokens), now, torch.device("cpu"))
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("script", [train_gpt, train_gpt_2026])
def test_a_second_round_of_the_warm_up_begins_without_what_the_first_one_left(
    script, tiny, monkeypatch
):
    """Compilation leaves cycles that hold gigabytes. The fork's last round has whole batches."""
    left, alive, micro_batches = [], [], []

    def step(model, optimizers, inputs, *_) -> None:
        def cycle():  # which holds itself
            return cycle

        left.append(weakref.ref(cycle))
        micro_batches.append(len(inputs))

    def count(*_) -> None:
        alive.append(sum(cycle() is not None for cycle in left))

    hp = script.Hyperparameters(**vars(tiny) | {"layers": "long,long,long,long"})
    model = SimpleNamespace(hp=hp)
    optimizers = SimpleNamespace(load_state_dict=lambda state: None, period=1, world_size=2)
    moments = [script.Moment(step, hp) for step in range(hp.num_iterations + 1)]
    monkeypatch.setattr(train_gpt.compilation, "allowed", True)
    monkeypatch.setattr(train_gpt, "train_step", step)
    monkeypatch.setattr(train_gpt, "evaluate", count)
    gc.disable()
    try:
        script.Run.warm_up(model, optimizers, moments, torch.device("cpu"))
    finally:
        gc.enable()
    assert len(left) > 1 and len(alive) > 1 and not any(alive)
    assert micro_batches[-1] == (hp.batch_seqs // 2 if script is train_gpt_2026 else 1)


def test_a_step_s_result_is_copied_while_the_gpu_computes(tiny, monkeypatch):
    """Of a made-up GPU."""
    copies = []
    values = SimpleNamespace(is_cuda=True, to=lambda *_, **how: [copies.append(how)])
    stream = SimpleNamespace(record_event=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch, "stack", lambda results: values)
    progress = train_gpt.Progress(SimpleNamespace(hp=tiny), 0, 0.0)
    progress.step_queued(train_gpt.Moment(0, tiny), {"loss": torch.zeros(())})
    assert copies == [{"non_blocking": True}]


def test_tables_are_bfloat16_on_a_gpu_alone():
    """Of a made-up device and model."""
    for kind, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        table, device = torch.nn.Linear(2, 2, dtype=torch.float64), SimpleNamespace(type=kind)
        model = SimpleNamespace(to=lambda device: model, tables=lambda: [table])  # noqa: B023
        run = SimpleNamespace(GPT=lambda hp: model)  # noqa: B023
        train_gpt.build(run, replace(train_gpt.RECORDS["demo"], compile="off"), device)
        assert table.weight.dtype == dtype


def test_the_gradient_s_norm_is_that_of_the_mean_loss(tiny, randomize):
    hp = replace(tiny, batch_seqs=2, grad_clip=1e9)
    model, plain = (randomize(train_gpt.GPT(hp)) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(hp.vocab_size, (2, 129), generator=generator)
    optimizers, now = train_gpt.Optimizers(model, hp), train_gpt.Moment(3, hp)
    result = train_gpt.train_step(model, optimizers, tokens[:, :-1].int(), tokens[:, 1:], now)
    logits = [plain.lm_head.logits(plain.hidden(t[:-1], now)) for t in tokens]
    loss = F.cross_entropy(torch.cat(logits), tokens[:, 1:].flatten())
    loss.backward()
    assert result["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    squares = sum(p.grad.double().square().sum().item() for p in plain.parameters())
    assert result["grad_norm"].item() == pytest.approx(squares**0.5, rel=1e-4)
