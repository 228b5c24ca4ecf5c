"""tools/watch.py: what it says and plots of a run, while the run is live and later."""

import fcntl
import json
import os
import re

import pytest

import watch
from runs import error_of
from train_gpt import HERE, RULE

RECORD = "2025-01-26_BatchSize"


@pytest.fixture
def log(tmp_path):
    """Return write(step), which writes the log of a run of the record up to that step."""

    def write(step: int, name: str = "it", data: str = "fineweb"):
        known = json.loads((HERE / "tools" / "published.json").read_text())[RECORD]
        lines, rows = [f"record {RECORD}\non 8 x NVIDIA H100, log in logs/it.txt"], [{"step": 0}]
        reached = min(step + 30, 1770)  # before the run went on from two steps before this one
        for i in [*range(reached + 1), *range(step - 1, step + 1)]:
            times = f"train_time:{100 * i}ms step_avg:100.00ms"
            lines += [f"step:{i}/1770 {times}"] * (i > 0)
            if loss := known["losses"].get(str(i)):
                lines.append(f"step:{i}/1770 val_loss:{loss + 0.01:.4f} {times}")
            if i > 0:
                row = {"step": i, "train_loss": 11 - 0.004 * i, "ms": 100.0}
                rows.append(row | {"tokens_per_s": 3900000})
        settings = f"script: train_gpt.py\ntrain_files: {data}_*.bin\nval_files: {data}_*.bin"
        path = tmp_path / f"{name}.txt"
        path.write_text(f"\n{RULE}\n".join(["source", "torch 2", settings, "\n".join(lines)]))
        rows = "".join(json.dumps(row) + "\n" for row in rows)
        path.with_suffix(".jsonl").write_text(rows + '{"step": 9')  # torn
        return path

    return write


def test_a_view_has_the_state_and_all_losses(log, tmp_path, capsys):
    """Of a run that is not on a terminal; and without its .jsonl."""
    watch.main([str(log(600))])
    out = capsys.readouterr().out
    above, plot = out.split("┌")
    words = " ".join(above.split())
    assert f"it.txt: train_gpt.py {RECORD}, step 600/1770, train loss 8.6000, " in words
    assert "val loss 3.7628 at step 500 (published: 3.7528), lately 100.0 ms/step, 3900.0k" in words
    assert "tokens/s, 0:01:57 left" in words and "\x1b" not in out
    assert (plot.count("●"), plot.count("○")) == (5, 11)  # at 0 to 500; at 625 to 1750, and 1770
    command = f"./run.sh train_gpt.py --record {RECORD} --run_id it --resume on"
    assert out.endswith(f"; go on with {command}\n")
    (tmp_path / "it.jsonl").unlink()
    watch.main([str(tmp_path / "it.txt")])
    assert "step 600/1770, val loss" in capsys.readouterr().out


def test_a_terminal_follows_the_newest_run_until_it_finishes(log, tmp_path, monkeypatch, capsys):
    """On other data than the record's, nothing is published."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    os.utime(log(3, "logs/old"), (1, 1))
    log(125, "logs/new", "mine")
    later = iter([600, 1770])
    monkeypatch.setattr(watch, "has_terminal", lambda: True)

    def sleep(_):
        step = next(later)
        log(step, "logs/new", "mine")
        if step == 1770:
            process.close()  # its lock ends

    monkeypatch.setattr(watch.time, "sleep", sleep)
    process = open("logs/new.txt")  # noqa: SIM115
    fcntl.flock(process, fcntl.LOCK_EX)
    watch.main([])
    out = capsys.readouterr().out
    assert re.findall(r"step (\d+)/1770,", out) == ["125", "600", "1770"]
    assert "finished, 177.0 s of training" in " ".join(out.split())
    assert "(published" not in out and out.count("○") == 3  # in legends


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_run_that_a_signal_has_stopped_is_not_waited_for(on_terminal, log, monkeypatch, capsys):
    monkeypatch.setattr(watch, "has_terminal", lambda: on_terminal)
    path, stop = log(600), "stopped by SIGINT after step 600: saved; go on with it"
    path.write_text(f"{path.read_text()}\n{stop}\n")
    watch.main([str(path)])
    assert capsys.readouterr().out.endswith(f"\n{stop}\n")


def test_an_error_is_a_line(tmp_path, capsys):
    (tmp_path / "it.txt").write_text("nothing")
    for path, message in {
        tmp_path / "it.txt": f"{tmp_path}/it.txt: has no line of a step",
        tmp_path: f"Is a directory: '{tmp_path}'",
    }.items():
        status, err = error_of([path], capsys, watch.main)
        assert status == 1 and err.startswith("watch.py: error: ") and message in err
