"""Whole runs on tiny models: what they print, log and learn."""

import importlib
import math
import os
import re
import runpy
import shutil
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


def test_log_holds_source_versions_settings_and_the_communitys_lines(flags, tmp_path, capsys):
    main(flags)
    console = capsys.readouterr().out
    (path,) = tmp_path.glob("logs/*.txt")
    log = path.read_text()
    assert log.startswith(Path(SCRIPT).read_text())
    source, versions, _, settings, results = re.split(f"(?m)^{RULE}\n", log)
    imported = re.findall(r"(?m)^ *(?:from|import) (\w+)", Path(SCRIPT).read_text())
    own = [HERE / f"{name}.py" for name in set(imported) if (HERE / f"{name}.py").exists()]
    assert HERE / "kernels.py" in own and all(path.read_text() in source for path in own)
    assert f"Python {sys.version}" in versions and f"torch {torch.__version__}" in versions
    assert "\nmodel_dim: 64\n" in settings and "\nadam_betas: 0.8 0.95\n" in settings
    assert re.search(r"^kernels: none\b", results, re.M)
    for text in (console, results):
        steps = [(int(m[1]), int(m[2])) for m in STEP.finditer(text)]
        assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
        assert list(val_losses(text)) == [0, 2, 4]
        assert re.search(r"^peak memory allocated: \d+ MiB reserved: \d+ MiB$", text, re.M)
    assert val_losses(results)[0] == pytest.approx(math.log(512), abs=1e-4)


def test_the_clock_counts_training_alone(flags, tmp_path, capsys, monkeypatch):
    """By a clock that moves only where the test says so: 10 ms a step, 5 s a validation."""
    now, step_of, evaluate = [0.0], train_gpt.train_step, train_gpt.evaluate

    def taking(seconds, function):
        def call(*arguments, **options):
            now[0] += seconds
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(train_gpt, "train_step", taking(0.010, step_of))
    monkeypatch.setattr(train_gpt, "evaluate", taking(5, evaluate))
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


def test_aligned_the_sample_trains(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen, step_of = [], train_gpt.train_step

    def watching(model, optimizers, inputs, *others, **options):
        seen.append(inputs.clone())
        return step_of(model, optimizers, inputs, *others, **options)

    monkeypatch.setattr(train_gpt, "warm_up", lambda *args, **kwargs: None)
    monkeypatch.setattr(train_gpt, "train_step", watching)
    data = "--val_loss_every 0 --align_to_documents on --max_document_tokens 100"
    main(f"--record demo_2025-01-26 {SMALL} {data}".split())
    assert val_losses(capsys.readouterr().out)[8] < 10
    assert len(seen) == 8 and all((inputs[:, [0, 100]] == 50256).all() for inputs in seen)
    assert len({tuple(inputs.flatten().tolist()) for inputs in seen}) == 8


@pytest.mark.parametrize("record", [name for name in RECORDS if not name.startswith("demo")])
def test_each_record_trains_on_the_sample_at_a_reduced_size(record, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = f"--train_files {HERE}/data/kjv_train_*.bin --val_files {HERE}/data/kjv_val_*.bin"
    flags += " --model_dim 64 --num_heads 2 --batch_seqs 3 --val_loss_every 4 --epochs 0"
    layers = "--layers short+v1,long+v2,short+backout,none+x1" if "2026" in record else ""
    main(f"--record {record} {SMALL} {flags} --num_layers 4 {layers}".split())
    console = capsys.readouterr().out
    losses = val_losses(console)
    assert abs(losses[0] - 10.8258) <= (0.01 if "2026" in record else 0)  # a tied head is not zero
    most = (10.5, 9.9) if "2026" in record else (10.2, 8.5)  # there Adam has made half the steps
    assert losses[4] < most[0] and losses[8] < most[1]
    assert "published" not in console  # other data than FineWeb


def test_without_flags_the_demo_trains_on_the_sample(tmp_path, capsys, monkeypatch):
    """All of its own but the width and the number of steps."""
    monkeypatch.chdir(tmp_path)
    narrow = "--device cpu --model_dim 32 --head_dim 16 --num_iterations 8 --save_every 0"
    main(f"{narrow} --val_tokens 1024 --val_loss_every 4".split())
    console = capsys.readouterr().out
    losses = val_losses(console)
    assert console.startswith("record demo --") and list(losses) == [0, 4, 8]
    assert abs(losses[0] - 10.8258) < 0.01 and losses[8] < 9


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
    program = Program(["--list_records"], ranks=2)
    assert program.end() == [0, 0]
    assert program.text("out").count("num_iterations") == 1 and not program.text("out", 1)


def test_import_has_no_side_effect(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import train_gpt"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr, list(tmp_path.iterdir())) == (0, "", "", [])


@pytest.mark.parametrize(
    ("name", "own", "expected"),
    [
        ("__main__", {}, "1000"),
        ("train_gpt", {}, None),
        ("__main__", {"GOMP_SPINCOUNT": "7"}, "7"),  # the user has said otherwise
        ("__main__", {"OMP_WAIT_POLICY": "x"}, None),
    ],
)
def test_threads_spin_for_a_short_time_in_a_program_but_not_after_an_import(
    name, own, expected, monkeypatch
):
    for variable in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(variable, own.get(variable, ""))
        if variable not in own:
            monkeypatch.delenv(variable)
    monkeypatch.setitem(sys.modules, "torch", None)  # it ends there, before OpenMP is loaded
    with pytest.raises(ImportError):
        runpy.run_path(SCRIPT, run_name=name)
    assert os.environ.get("GOMP_SPINCOUNT") == expected


def test_without_kernels_and_published_losses_it_runs_the_same(
    flags, tmp_path, capsys, monkeypatch
):
    """A copy that lacks kernels.py and tools/."""
    flags += ["--val_loss_every", "0"]
    main(flags)
    expected = val_losses(capsys.readouterr().out)
    for path in HERE.glob("*.py"):
        if path.name != "kernels.py":
            shutil.copy(path, tmp_path)
            monkeypatch.delitem(sys.modules, path.stem, raising=False)
    monkeypatch.setitem(sys.modules, "kernels", None)  # not the one that other tests have imported
    monkeypatch.syspath_prepend(tmp_path)
    alone = importlib.import_module("train_gpt")
    assert Path(alone.__file__).parent == tmp_path
    alone.main(flags)
    out = capsys.readouterr().out
    assert val_losses(out) == expected and "kernels: none, kernels.py" in out
    alone.main(["--list_records"])
    row = re.search(r"^published minutes +(.*)", capsys.readouterr().out, re.M)[1]
    assert row.split() == ["-"] * len(RECORDS)
