"""The summary of a run: its last lines, and its line in logs/results.jsonl."""

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import history
import launch
import result
import train_gpt
from runs import SCRIPT, Program, console_of
from test_scripts import launch_with
from tokenizer import GPT2
from train_gpt import SAMPLE


def test_a_summary_is_what_the_run_did(trained, monkeypatch, capsys):
    """Bits per byte are computed from the text that tiktoken decodes. Steps may be of several
    lengths."""
    monkeypatch.chdir(trained.folder)
    lengths = [128, 128, 256, 256, 256, 384, 384, 384]
    moment = lambda step, hp: SimpleNamespace(seq_len=lengths[step])  # noqa: E731
    monkeypatch.setattr(train_gpt.Run, "Moment", moment)
    saved = train_gpt.load_checkpoint(trained.path, train_gpt.Run)
    hp = replace(saved["hyperparameters"], run_id="it")
    start = result.Start(Path(SCRIPT), hp, "demo")
    start.log_size = 0
    found = result.result_of(start, result.End(0))
    val = train_gpt.load_data_shard(f"{SAMPLE}_val_000000.bin")[1:1025].tolist()
    encoding = GPT2(hp.end_of_text).encoding
    text = encoding.decode_bytes([token for token in val if token != hp.end_of_text])
    loss = found["val_loss"]
    expected = {
        "run": "it",
        "status": "finished",
        "data": f"{SAMPLE}_train_*.bin; 1024 tokens of {SAMPLE}_val_*.bin",
        "train_loss": float(re.findall(r"train_loss:(\S+)", trained.console)[-1]),
        "script": "train_gpt.py",
        "machine": "1 x CPU",
        "tokens": 2 * sum(lengths),
        "parameters": sum(tensor.numel() for tensor in saved["model"].values()),
        "train_time_s": pytest.approx(saved["seconds"], abs=0.001),
        "ms_per_step": pytest.approx(1e3 * saved["seconds"] / 8, abs=0.1),
        "bits_per_byte": pytest.approx(loss * 1024 / math.log(2) / len(text), abs=1e-5),
    }
    assert {key: found[key] for key in expected} == expected
    assert f"val_loss:{loss:.5f}" in trained.console
    assert found.keys() == result.not_begun(Path(SCRIPT), [], ValueError()).keys()
    shown = "log status steps train_loss val_loss bits_per_byte train_time_s ms_per_step"
    lines = [f"{key}: {found[key]}" for key in f"{shown} tokens_per_s".split()]
    result.print_result(found)
    assert capsys.readouterr().out == "\n" + "\n".join(lines) + "\n"
    result.print_result(found | {"group": "ten", "resume": "cd a && b"})
    assert capsys.readouterr().out == ", ".join([*lines, "resume: cd a && b"]) + "\n"


def test_a_run_that_goes_on_counts_whole_and_a_start_without_lines_has_failed(trained, elsewhere):
    """After a stop, the run goes on and fails. It may fail in its first step. A script may start
    none."""
    log = Path("logs/it.txt")
    log.parent.mkdir()
    whole = (trained.folder / log).read_text()
    hp = replace(train_gpt.RECORDS["demo"], run_id="it")
    log.write_text(f"{whole[: whole.index('step:6/8')]}stopped by SIGTERM after step 5: saved\n")
    start = result.Start(Path(SCRIPT), hp, "demo")
    again = "record demo\nresumed at step 5\nstep:6/8 train_time:1200ms step_avg:200.00ms\n"
    again += "peak memory allocated: 12 MiB reserved: 34 MiB\n"
    log.write_text(log.read_text() + again)
    found = result.result_of(start, result.End(1, "the disk is full", "x.py", 3))
    assert (found["status"], found["reason"], found["steps"]) == ("failed", "the disk is full", 6)
    assert found["train_time_s"] == 1.2 and found["val_loss"] is None
    assert (found["file"], found["line"], found["peak_memory_mib"]) == ("x.py", 3, 12)
    found = result.result_of(start, result.End(143, "SIGTERM"))
    assert (found["status"], found["reason"]) == ("stopped", "SIGTERM: no checkpoint was saved")
    log.write_text(whole[: whole.index("step:1/8")])
    found = result.result_of(start, result.End(1, "KeyError: 1"))
    unknown = "train_loss", "val_loss", "bits_per_byte", "ms_per_step", "tokens_per_s"
    assert (found["status"], found["steps"]) == ("failed", 0)
    assert [found[name] for name in unknown] == [None] * 5
    found = result.result_of(result.Start(Path(SCRIPT), hp, "demo"), result.End(0))
    assert found["status"] == "failed" and "started no run" in found["reason"]
    assert found["exit"] == 1 and found["machine"] is None


def test_runs_are_listed_by_a_text_and_in_the_order_of_a_column(tool):
    """Unknown numbers come last; a run of two starts has one row, and comparisons have none."""
    row = {"kind": "run", "log": "a.txt", "script": "train_gpt.py", "record": "demo", "flags": ""}
    tried = {
        "a": {"status": "finished", "val_loss": 3.4, "steps": 320, "flags": "--muon_lr 0.06"},
        "b": {"status": "failed", "script": "my_fork.py", "flags": "--muon_lr 0.07"},
        "c": {"status": "finished", "val_loss": 3.3, "bits_per_byte": 1.5, "ms_per_step": 210.04},
    }
    stopped = row | {"run": "a", "status": "stopped"}
    objects = [stopped, *(row | of | {"run": name} for name, of in tried.items())]
    objects.append({"kind": "comparison", "run": "d"})
    files = {"logs/results.jsonl": "".join(f"{train_gpt.to_json(of)}\n" for of in objects)}
    _, out, _ = tool(history.main, ["--sort", "val_loss"], files)
    assert [re.split("  +", line) for line in out.splitlines()[1:]] == [
        ["c", "finished", "-", "3.3000", "1.5000", "210.0", "train_gpt.py demo"],
        ["a", "finished", "320", "3.4000", "-", "-", "train_gpt.py demo --muon_lr 0.06"],
        ["b", "failed", "-", "-", "-", "-", "my_fork.py demo --muon_lr 0.07"],
    ]
    _, out, _ = tool(history.main, ["muon_lr"], files)
    assert re.findall("(?m)^[abcd] ", out) == ["a ", "b "]
    assert "has no such run" in tool(history.main, ["e5"], files)[2]


TRACEBACK = """Traceback (most recent call last):
[rank0]: KeyError: 'it'
[rank0]: Traceback (most recent call last):
[rank0]:   File "/my/fork.py", line 3, in main
[rank0]:   File "/my/fork.py", line 7, in forward
[rank0]:   File "/lib/site-packages/torch/x.py", line 9, in forward
[rank0]: TypeError: no such thing
===================="""


@pytest.mark.parametrize(
    ("source", "end"),
    [
        (f"exit({TRACEBACK!r})", (1, "TypeError: no such thing", "/my/fork.py", 7)),
        ("exit('x.py: error: the disk is full')", (1, "x.py: error: the disk is full")),
        ("import os\nos.kill(os.getpid(), 9)", (137, "SIGKILL")),
    ],
)
def test_the_reason_of_a_failure_is_its_error(source, end, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(source)
    hp = replace(train_gpt.RECORDS["demo"], device="cpu")
    assert launch.start(hp, [str(path)]) == result.End(*end)


def test_a_refused_start_tells_nothing_of_the_run_that_has_its_name(flags, tmp_path):
    """Which has begun a moment before, and writes the log."""
    hp, record = train_gpt.parse_args([*flags, "--run_id", "it"], train_gpt.Run)
    begin = result.Start(Path(SCRIPT), hp, record)
    console_of([*flags, "--run_id", "it"], tmp_path)
    reason = "error: another process is writing logs/it.txt: choose another --run_id"
    found = result.result_of(begin, result.End(1, reason))
    assert (found["status"], found["reason"]) == ("failed", reason)
    assert found.get("train_loss") is None


def test_a_program_reads_how_each_run_ended(flags, tmp_path):
    """One has a loss that is not finite, one has an error in its script. One that is stopped is in
    test_console.py."""
    (tmp_path / "wrong.py").write_text("def f():\n    print(undefined)\nf()\n")
    flags += ["--val_loss_every", "0", "--batch_seqs", "2"]
    failing = Program([*flags, "--embed_lr", "9e37"], work=launch_with)
    wrong = Program(["wrong.py"], work=launch_with)
    assert failing.end() == wrong.end() == [1]
    found = {line["status"]: line for line in result.noted()}
    assert found["diverged"]["reason"] == (
        "train_gpt.py: error: the loss is nan at step 2: "
        "try lower rates, smaller initial weights or --fp8 off"
    )
    assert found["failed"]["reason"] == "NameError: name 'undefined' is not defined"
    assert (found["failed"]["file"], found["failed"]["line"]) == (f"{tmp_path}/wrong.py", 2)
