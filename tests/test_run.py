"""Whole runs on tiny models: what they print, log and learn."""

import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from runs import SCRIPT, STEP, Program, error_of, rows, val_losses

import train_gpt
from train_gpt import HERE, RECORDS, main

RULE = "=" * 100


@pytest.fixture
def flags(flags) -> list[str]:
    return [*flags, "--batch_seqs", "2", "--val_tokens", "512"]


def test_log_holds_source_versions_machine_settings_and_the_communitys_lines(
    flags, tmp_path, capsys
):
    main(flags)
    console = capsys.readouterr().out
    (path,) = tmp_path.glob("logs/*.txt")
    log = path.read_text()
    source, versions, machine, settings, kernels, results = re.split(f"(?m)^{RULE}\n", log)
    assert source == Path(SCRIPT).read_text() + "\n"  # the started script alone
    assert kernels == "kernels.py:\n" + (HERE / "kernels.py").read_text() + "\n"
    assert str(os.cpu_count()) in machine
    assert f"Python {sys.version}" in versions and f"torch {torch.__version__}" in versions
    assert "\nmodel_dim: 64\n" in settings and "\nadam_betas: 0.8 0.95\n" in settings
    assert not re.search("kernel|FP8", results)  # which a CPU has not
    for text in (console, results):
        steps = [(int(m[1]), int(m[2])) for m in STEP.finditer(text)]
        assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
        assert list(val_losses(text)) == [0, 2, 4]
        assert re.search(r"^peak memory allocated: \d+ MiB reserved: \d+ MiB$", text, re.M)
    assert val_losses(results)[0] == pytest.approx(math.log(512), abs=1e-4)


def test_the_clock_counts_training_alone(flags, tmp_path, capsys, monkeypatch):
    """The clock here moves only where the test says so: 10 ms a step, 5 s a validation."""
    now = [0.0]

    def taking(seconds, function):
        def call(*arguments, **options):
            now[0] += seconds
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(train_gpt, "train_step", taking(0.010, train_gpt.train_step))
    monkeypatch.setattr(train_gpt, "evaluate", taking(5, train_gpt.evaluate))
    main([*flags, "--run_id", "it", "--save_every", "3", "--num_iterations", "7"])
    out = capsys.readouterr().out
    times = {int(m[1]): (int(m[3]), float(m[4])) for m in STEP.finditer(out)}
    assert times == {step: (10 * step, 10.0) for step in range(1, 8)}
    validated = re.findall(r"step:(\d)/7 val_loss:\S+ train_time:(\d+)ms", out)
    assert validated == [("0", "0"), ("2", "20"), ("4", "40"), ("6", "60"), ("7", "70")]
    found = rows(tmp_path / "logs/it.jsonl")[1:]
    assert [row["ms"] for row in found] == pytest.approx([10.0] * 7)
    assert [row["tokens_per_s"] for row in found] == [2 * 128 * 100] * 7


def test_loss_falls(flags, capsys):
    main([*flags, "--batch_seqs", "4", "--num_iterations", "16", "--val_loss_every", "0"])
    losses = val_losses(capsys.readouterr().out)
    assert list(losses) == [16]
    assert losses[16] < 4  # 6.24 at the start, 2.5 is the entropy of the language


SMALL = "--num_layers 2 --model_dim 32 --num_heads 1 --head_dim 32 --batch_seqs 2 --device cpu"
SMALL += " --seq_len 128 --val_seq_len 256 --val_tokens 256 --num_iterations 8 --save_every 0"


@pytest.mark.parametrize("record", [name for name in RECORDS if name != "demo"])
def test_each_record_trains_on_the_sample_at_a_reduced_size(record, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = f"--train_files {HERE}/data/kjv_train_*.bin --val_files {HERE}/data/kjv_val_*.bin"
    flags += " --model_dim 64 --num_heads 2 --batch_seqs 3 --val_loss_every 4 --epochs 0"
    main(f"--record {record} {SMALL} {flags} --num_layers 4".split())
    console = capsys.readouterr().out
    losses = val_losses(console)
    assert losses[0] == 10.8258 and losses[4] < 10.2 and losses[8] < 8.5
    assert "published" not in console  # other data than FineWeb


def test_after_a_run_on_fineweb_the_console_names_the_command_that_compares_it(
    flags, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(train_gpt, "FINEWEB", str(tmp_path / "train"))
    main([*flags, "--run_id", "it", "--num_iterations", "1", "--save_every", "0"])
    last = capsys.readouterr().out.splitlines()[-1]
    run_sh = HERE / "run.sh"
    assert last == f"compare with published runs: {run_sh} tools/records.py logs/it.txt"


def test_after_a_run_that_saved_the_console_names_the_command_that_samples_from_it(flags, capsys):
    main([*flags, "--run_id", "it", "--num_iterations", "2", "--save_every", "2"])
    last = capsys.readouterr().out.splitlines()[-1]
    path = "logs/it/state_step000002.pt"
    assert last == f"read what it writes: {HERE / 'run.sh'} tools/sample.py {path}"


def test_without_flags_the_demo_trains_on_the_sample(tmp_path, capsys, monkeypatch):
    """All is its own but the width and the number of steps."""
    monkeypatch.chdir(tmp_path)
    narrow = "--device cpu --model_dim 32 --head_dim 16 --num_iterations 8 --save_every 0"
    main(f"{narrow} --val_tokens 1024 --val_loss_every 4".split())
    console = capsys.readouterr().out
    losses = val_losses(console)
    assert console.startswith("record demo --") and list(losses) == [0, 4, 8]
    assert losses[0] == 10.8258 and losses[8] < 9


def test_on_a_cpu_without_flags_a_line_says_that_it_is_a_demonstration(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    small = "--model_dim 32 --head_dim 16 --num_iterations 1 --save_every 0 --val_tokens 1024"
    main(small.split())
    line = "\nno GPU found: this is a small demonstration, on the sample corpus in data/\n"
    assert line in capsys.readouterr().out
    main([*small.split(), "--device", "cpu"])
    assert line not in capsys.readouterr().out


def test_warm_up_leaves_no_trace(flags, capsys, monkeypatch):
    main(flags)
    warm = val_losses(capsys.readouterr().out)
    monkeypatch.setattr(train_gpt, "warm_up", lambda *args, **kwargs: None)
    main(flags)
    assert val_losses(capsys.readouterr().out) == warm


def test_a_log_is_never_overwritten(flags, tmp_path, capsys):
    flags += ["--run_id", "mine", "--val_loss_every", "0"]
    main(flags)
    log = (tmp_path / "logs" / "mine.txt").read_text()
    assert "log in logs/mine.txt" in capsys.readouterr().out and "step:4/4 val_loss" in log
    status, err = error_of(flags, capsys)
    assert status == 1 and "logs/mine.txt is there already: choose another --run_id" in err
    assert (tmp_path / "logs" / "mine.txt").read_text() == log


def test_only_rank_0_prints():
    program = Program(["--help"], ranks=2)
    assert program.end() == [0, 0]
    assert program.text("out").count("--num_iterations") == 1 and not program.text("out", 1)


def test_import_has_no_side_effect(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import train_gpt"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr, list(tmp_path.iterdir())) == (0, "", "", [])


@pytest.mark.parametrize(
    ("loadavg", "environment", "spins"),
    [
        ("0.00 0.00 0.00 1/80 999", {}, None),  # this thread alone runs
        ("1.99 1.50 0.70 1/80 999", {}, None),  # another run has just ended
        ("0.00 0.00 0.00 3/80 999", {}, "1000"),
        ("0.00 0.00 0.00 2/80 999", {}, "1000"),
        ("0.00 0.00 0.00 3/80 999", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("0.00 0.00 0.00 3/80 999", {"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_where_other_programs_run_threads_do_not_spin_long(loadavg, environment, spins):
    """This is so before torch is imported, as train_gpt.py is."""
    before, _ = Path(SCRIPT).read_text().split("import numpy as np\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(environment))
        patch.setattr(Path, "read_text", lambda path: loadavg)
        exec(before, {"__name__": "train_gpt"})
        assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_a_thread_that_runs_for_a_moment_is_no_other_program():
    before, _ = Path(SCRIPT).read_text().split("import numpy as np\n")
    looks = iter(["0 0 0 3/80 9", "0 0 0 1/80 9", "0 0 0 3/80 9"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", {})
        patch.setattr(Path, "read_text", lambda path: next(looks))
        exec(before, {"__name__": "train_gpt"})
        assert not os.environ
