"""tools/launch.py: what it fetches and starts."""

import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import launch
import leaderboard
import machine
import result
import script
import tokenizer
import train_gpt
from runs import error_of
from train_gpt import HERE

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.parametrize(("nproc", "gpus", "processes"), [("", 3, 2), ("", 0, 1), ("2", 8, 2)])
def test_a_batch_of_8_has_a_number_of_processes_that_divides_it(
    nproc, gpus, processes, monkeypatch
):
    monkeypatch.setenv("NPROC", nproc)
    assert launch.processes(8, gpus) == processes
    monkeypatch.setenv("NPROC", "3")
    with pytest.raises(train_gpt.UserError, match="NPROC=3: .* --batch_seqs 8 allow 1, 2"):
        launch.processes(8, gpus)


@pytest.mark.parametrize(
    ("fork", "words", "shards"),
    [
        ("train_gpt.py", "--record 2025 --num_iterations 3", 1),
        ("train_gpt.py", "--record 2025 --train_files mine_*.bin", 0),
        ("forks/train_gpt_2026.py", "--record 2025-08 --num_iterations 1000", 5),  # 1.03 x 393.2M
        ("train_gpt.py", "--record 2025-01-26", 7),
        ("forks/train_gpt_2026_08.py", "--record 2026-07-17", 6),  # 1.6 times 338.8M
    ],
)
def test_a_run_fetches_the_shards_that_it_reads_and_is_started_by_torchrun(
    fork, words, shards, monkeypatch
):
    fetched = []
    words = [*words.split(), "--device", "cuda"]

    def fetch(command):
        fetched.append(command[2:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", fetch)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: sys.exit(command[1:]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "compiler_fault", lambda: "")
    with pytest.raises(SystemExit) as end:
        launch.main([fork, *words])
    assert fetched == ([[str(shards)]] if shards else [])
    expected = ["--standalone", "--local_addr=127.0.0.1", "--nproc_per_node=8"]
    expected += [f"{HERE}/{fork}", *words, "--run_id"]
    assert end.value.code[1:-1] == [f"{HERE}/tools/ranks.py", *expected]


def test_a_signal_that_comes_before_the_program_ends_it(monkeypatch):
    begin = subprocess.Popen

    def begin_late(*arguments, **options):
        signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)
        return begin(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", begin_late)
    hp = replace(train_gpt.RECORDS["demo"], device="cpu")
    assert launch.start(hp, ["-c", "import time; time.sleep(100)"]).status == 128 + signal.SIGTERM


def test_a_rank_that_was_killed_is_named(monkeypatch, tmp_path):
    """As the system does it when memory runs out. torchrun ends the other rank."""
    path = tmp_path / "it.py"
    path.write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.kill(os.getpid(), 9)\n"
        "time.sleep(100)\n"
    )
    monkeypatch.setenv("NPROC", "2")
    end = launch.start(replace(train_gpt.RECORDS["demo"], device="cpu"), [str(path)])
    assert (end.status, end.reason) == (137, "SIGKILL ended rank 1")


def test_processes_share_the_cores_of_a_job(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("NPROC", "4")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 13)  # it knows the job's cores
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, **_: sys.exit(env))
    with pytest.raises(SystemExit) as end:
        launch.start(replace(train_gpt.RECORDS["demo"], device="cpu"), ["it.py"])
    assert end.value.code["OMP_NUM_THREADS"] == "3"


def test_finished_runs_of_a_group_are_not_made_again(flags, monkeypatch, capsys):
    """One that has begun is resumed. Other flags, or another source, are refused. The runs'
    statistics follow."""
    made, stopped = [], []

    def train(path, words, group) -> dict:
        hp, record = script.parse(path, words)
        made.append((hp.run_id, hp.seed, hp.resume))
        begin = result.Start(path, hp, record, group)
        if stopped:
            return {"exit": stopped.pop()}
        train_gpt.main(words)
        found = result.result_of(begin, result.End(0))
        result.note(found)
        return found

    def statistics(command) -> subprocess.CompletedProcess:
        with pytest.raises(SystemExit) as end:
            leaderboard.main(command[2:])
        return subprocess.CompletedProcess(command, end.value.code)

    def ended(words: str) -> tuple[int, list]:
        made.clear()
        with pytest.raises(SystemExit) as end:
            launch.main([*flags, "--num_iterations", "2", "--run_id", "ten", *words.split()])
        return end.value.code, made

    monkeypatch.setattr(launch, "train", train)
    monkeypatch.setattr(launch, "subprocess", SimpleNamespace(run=statistics))
    assert ended("--runs 2") == (0, [("ten_seed1", 1, False), ("ten_seed2", 2, False)])
    assert not list(Path("logs").glob("*/*.pt"))
    capsys.readouterr()
    assert ended("--runs 3 --keep 1") == (0, [("ten_seed3", 3, False)])
    assert Path("logs/ten_seed3/state_step000002.pt").exists() and ended("--runs 0") == (1, [])
    assert re.search(r"\nA  +3  +\d\.\d{5} ", capsys.readouterr().out)
    rows = [(run["run"], run["group"]) for run in result.noted()]
    assert rows == [(f"ten_seed{seed}", "ten") for seed in (1, 2, 3)]
    assert ended("--runs 2 --val_loss_every 1 --save_every 1 --keep 1") == (0, [])
    assert ended("--runs 2 --muon_lr 0.1") == (1, [])
    reason = "logs/ten_seed1.txt was made without --muon_lr 0.1: choose another --run_id"
    assert reason in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(result, "digest", lambda path: "edited")
        assert ended("--runs 2") == (1, [])
        assert "was made by another source: choose" in capsys.readouterr().err

    Path("logs/ten_seed4.txt").write_text("begun")
    assert ended("--seed 4 --runs 1") == (0, [("ten_seed4", 4, True)])
    stopped.append(3)
    assert ended("--seed 5 --runs 2") == (3, [("ten_seed5", 5, False)])


def test_a_run_s_last_object_with_a_log_counts():
    """The run was resumed alone, and stays in its group."""
    run = {"kind": "run", "log": "it.txt", "status": "finished", "run": "base_seed3"}
    result.note(run | {"group": "base", "status": "stopped"})
    result.note(run)
    result.note(run | {"log": None, "status": "failed"})  # it was refused
    (found,) = result.runs_noted()
    assert (found["group"], found["status"]) == ("base", "finished")


def test_a_name_that_is_taken_or_a_typo_starts_nothing_and_adds_no_line(monkeypatch, capsys):
    monkeypatch.setattr(launch, "start", lambda *_: pytest.fail("a run was started"))
    Path("logs").mkdir()
    Path("logs/it.txt").write_text("a log")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    messages = {"--num_iteration 3": "unknown words", "": "it.txt exists: .* or --resume on"}
    messages["--device cuda"] = "--device cuda: torch finds no GPU here"
    for words, message in messages.items():
        _, err = error_of(["--run_id", "it", *words.split()], capsys, launch.main)
        assert re.search(message, err)
    assert not result.RESULTS.exists()


@pytest.mark.parametrize("what", ["a link", "a file", "results", "vocab.bpe", "its mask"])
def test_what_the_end_of_a_run_needs_is_looked_up_before_it_begins(what, monkeypatch, capsys):
    monkeypatch.setattr(launch, "start", lambda *_, **more: pytest.fail("a run was started"))
    words, logs = ["--device", "cpu"], Path("logs")
    if what == "a link":
        logs.symlink_to("nowhere")
    elif what == "a file":
        logs.touch()
    elif what == "results":
        (logs / "results.jsonl").mkdir(parents=True)
    elif what == "vocab.bpe":
        monkeypatch.setattr(tokenizer, "MERGES", Path("data/vocab.bpe"))
    else:
        words = ["forks/train_gpt_2026_08.py", *words]
        monkeypatch.setattr(train_gpt, "HERE", Path("alone"))
    message = {"vocab.bpe": "data/vocab.bpe is missing", "its mask": "alone/data/vocab.bpe is"}
    _, err = error_of(words, capsys, launch.main)
    assert message.get(what, "error: could not write logs") in err


def test_a_run_whose_lines_are_hidden_is_spoken_of(capfd):
    """A line of its metrics is torn, and one is being written."""
    hp = replace(train_gpt.RECORDS["demo"], run_id="it", num_iterations=80)
    assert "my.py: starting" in launch.news_of(hp, "my.py", "")
    Path("logs").mkdir()
    Path("logs/it.txt").touch()
    row = {"step": 20, "train_loss": 4.5678, "ms": 1500.0}
    Path("logs/it.jsonl").write_text(f'{{"st\n{train_gpt.to_json(row)}\n{{"step": 21, "tr')
    assert launch.news_of(hp, "my.py", "pair 1, A") == "pair 1, A: step 20/80, 01:30 left"
    assert launch.news_of(hp, "my.py", "") == ""
    assert capfd.readouterr() == ("", "logs/it.jsonl:1 is not JSON: left out\n")
