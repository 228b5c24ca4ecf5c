"""The summary of a run: its last lines, and its line in logs/results.jsonl."""

import json
import math
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import process
import result
import train_gpt
from gpt2 import gpt2_encoding
from runs import SCRIPT, Program
from test_scripts import launch_with
from train_gpt import SAMPLE


def results() -> list[dict]:
    """Return all lines of logs/results.jsonl."""
    return [json.loads(line) for line in result.RESULTS.read_text().splitlines()]


def test_a_summary_is_what_the_run_did(trained, monkeypatch, capsys):
    """Bits per byte are computed from the text that tiktoken decodes."""
    monkeypatch.chdir(trained.folder)
    saved = train_gpt.load_checkpoint(trained.path, train_gpt.Run)
    hp = replace(saved["hyperparameters"], run_id="it")
    start = result.Start(Path(SCRIPT), hp, "demo")
    start.log_size = 0
    found = result.result_of(start, 0, "")
    val = train_gpt.load_data_shard(f"{SAMPLE}_val_000000.bin")[1:1025].tolist()
    text = gpt2_encoding().decode_bytes([token for token in val if token != 50256])
    loss, parameters = found["val_loss"], sum(t.numel() for t in saved["model"].values())
    expected = {
        "run": "it",
        "status": "finished",
        "script": "train_gpt.py",
        "record": "demo",
        "machine": "1 x CPU",
        "kernels": None,
        "steps": 8,
        "tokens": 8 * 2 * 128,
        "parameters": parameters,
        "train_time_s": pytest.approx(saved["seconds"], abs=0.001),
        "ms_per_step": pytest.approx(1e3 * saved["seconds"] / 8, abs=0.1),
        "bits_per_byte": pytest.approx(loss * 1024 / math.log(2) / len(text), abs=1e-5),
    }
    assert {key: found[key] for key in expected} == expected
    assert f"val_loss:{loss:.5f}" in trained.console
    assert found.keys() == result.not_begun(Path(SCRIPT), [], ValueError()).keys()
    result.print_result(found)
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.split("\n")[1:-1])
    assert lines == {key: str(value) for key, value in found.items() if value is not None}


def test_only_what_this_start_has_written_counts(trained, monkeypatch, tmp_path):
    """After a stop, the run goes on and fails. Another process may write a run of that name. A
    script may start none."""
    monkeypatch.chdir(tmp_path)
    log = Path("logs/it.txt")
    log.parent.mkdir()
    whole = (trained.folder / log).read_text()
    first, last = whole[: whole.index("step:6/8")], whole[whole.index("step:6/8") :]
    hp = replace(train_gpt.RECORDS["demo"], run_id="it")
    log.write_text(f"{first}stopped by SIGTERM after step 5: saved\n")

    start = result.Start(Path(SCRIPT), hp, "demo")
    log.write_text(f"{log.read_text()}record demo\nresumed at step 5\nstep:6/8 train_time:1200ms ")
    found = result.result_of(start, 1, "the loss is nan")
    assert (found["status"], found["reason"], found["steps"]) == ("failed", "the loss is nan", 6)
    assert found["train_time_s"] == 1.2 and found["val_loss"] is None

    start = result.Start(Path(SCRIPT), hp, "demo")
    log.write_text(log.read_text() + last)
    found = result.result_of(start, 1, "another process is writing the run")
    assert (found["status"], found["steps"], found["machine"]) == ("failed", 0, None)
    found = result.result_of(result.Start(Path(SCRIPT), hp, "demo"), 0, "")
    assert found["status"] == "failed" and "started no run" in found["reason"]


TRACEBACK = """Traceback (most recent call last):
[rank0]: TypeError: no such thing
====================
  train_gpt.py FAILED
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
===================="""
SCRIPTS = {
    f"import sys\nsys.exit({TRACEBACK!r})": (1, "TypeError: no such thing"),
    "import sys\nsys.exit('x.py: error: the disk is full')": (1, "x.py: error: the disk is full"),
    "import os\nos.kill(os.getpid(), 9)": (137, "SIGKILL"),
    "": (0, ""),
}


@pytest.mark.parametrize("source", SCRIPTS)
def test_the_reason_of_a_failure_is_its_error(source, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(source)
    hp = replace(train_gpt.RECORDS["demo"], device="cpu")
    assert process.start(hp, [str(path)]) == SCRIPTS[source]


def test_a_program_reads_how_each_run_ended(flags, tmp_path):
    """One diverges, one is stopped and goes on, one has an error in its script."""
    (tmp_path / "wrong.py").write_text("import train_gpt\nprint(undefined)\n")
    flags += ["--val_loss_every", "0", "--batch_seqs", "2"]
    failing = Program([*flags, "--embed_lr", "1e38"], work=launch_with)
    wrong = Program(["wrong.py"], work=launch_with)
    assert failing.end() == wrong.end() == [1]
    reasons = {found["reason"] for found in results()}
    assert reasons == {
        "train_gpt.py: error: the loss is nan at step 2: "
        "try lower rates, smaller initial weights or --fp8 off",
        "NameError: name 'undefined' is not defined",
    }
    long = [*flags, "--num_iterations", "100000", "--run_id", "it"]
    stopped = Program(long, work=launch_with)
    stopped.wait_for("step:3/")
    stopped.send(signal.SIGTERM)  # the launcher passes it on
    assert stopped.end() == [128 + signal.SIGTERM], stopped.text("err")
    last = results()[-1]
    assert (last["status"], last["reason"], last["val_loss"]) == ("stopped", "SIGTERM", None)
    saved = torch.load(*Path("logs/it").iterdir(), weights_only=True)
    assert saved["step"] == last["steps"]
    assert "status: stopped\nreason: SIGTERM\n" in stopped.text("out")
