"""tools/watch.py: what it says and plots of a run, while the run is live and later."""

import fcntl
import json
import os
import re

import pytest

import watch
from train_gpt import HERE

RECORD = "2025-01-26_BatchSize"
RULE = "=" * 100


@pytest.fixture
def log(tmp_path):
    """Return write(step), which writes the log of a run of the record up to that step."""

    def write(step: int, name: str = "it", data: str = "fineweb"):
        known = json.loads((HERE / "tools" / "published.json").read_text())[RECORD]
        lines, rows = [f"record {RECORD}\non 8 x NVIDIA H100, log in logs/it.txt"], [{"step": 0}]
        reached = min(step + 30, 1770)  # before the run went on from two steps before this one
        for i in range(reached + 1):
            times = f"train_time:{100 * i}ms step_avg:100.00ms"
            lines += [f"step:{i}/1770 {times}"] * (i > 0)
            if loss := known["losses"].get(str(i)):
                lines.append(f"step:{i}/1770 val_loss:{loss + 0.01:.4f} {times}")
        for i in [*range(1, reached + 1), *range(step - 1, step + 1)]:
            rows.append({"step": i, "train_loss": 11 - 0.004 * i, "ms": 100.0})
            rows[-1]["tokens_per_s"] = 3900000
        settings = f"train_files: {data}_train_*.bin\nval_files: {data}_val_*.bin"
        settings += "\nscript: train_gpt.py"
        path = tmp_path / f"{name}.txt"
        path.write_text(f"\n{RULE}\n".join(["source", "torch 2", settings, "\n".join(lines)]))
        rows = "".join(json.dumps(row) + "\n" for row in rows)
        path.with_suffix(".jsonl").write_text(rows + '{"step": 9')  # torn
        return path

    return write


def test_a_view_has_the_state_and_all_losses(log, tmp_path, capsys):
    watch.main([str(log(600))])
    out = capsys.readouterr().out
    above, plot = out.split("┌")
    words = " ".join(above.split())
    assert f"it.txt: train_gpt.py {RECORD} step 600/1770, train loss 8.6000, " in words
    assert "val loss 3.7628 at step 500 (published: 3.7528), lately 100.0 ms/step, 3900.0k" in words
    assert "0:01:57 of training left, last " in words and "\x1b" not in out
    assert (plot.count("●"), plot.count("○")) == (5, 11)  # at 0 to 500; at 625 to 1750, and 1770
    (tmp_path / "it.jsonl").unlink()
    watch.main([str(tmp_path / "it.txt")])
    assert "step 625/1770, val loss" in capsys.readouterr().out


def test_a_terminal_follows_the_newest_run_until_it_finishes(log, tmp_path, monkeypatch, capsys):
    """On other data than the record's, nothing is published."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    os.utime(log(3, "logs/old"), (1, 1))
    log(125, "logs/new", "mine")
    later = iter([600, 1770])
    monkeypatch.setattr(watch.sys.stdout, "isatty", lambda: True, raising=False)

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
    assert "finished, 177.0 s of training" in " ".join(out.split()) and "published" not in out


@pytest.mark.parametrize(
    ("last", "end"),
    [
        ("stopped by SIGINT after step 600: saved; go on with it", "stopped by SIGINT after step"),
        ("", "run failed or was killed; go on with ./run.sh train_gpt.py --record 2025-01-26_B"),
    ],
)
@pytest.mark.parametrize("live", [True, False])
def test_a_run_that_ended_early_is_not_waited_for(last, end, live, log, monkeypatch, capsys):
    monkeypatch.setattr(watch.sys.stdout, "isatty", lambda: live, raising=False)
    path = log(600)
    path.write_text(f"{path.read_text()}\n{last}")
    watch.main([str(path)])
    line = capsys.readouterr().out.splitlines()[-1]
    assert end in line and (last or line.endswith(" --run_id it --resume on"))


def test_an_error_is_a_line(tmp_path):
    (tmp_path / "it.txt").write_text("nothing")
    for path, message in ((tmp_path / "it.txt", "has no line of a step"), (tmp_path, "Is a dir")):
        with pytest.raises(SystemExit, match=f"^watch.py: {path}: {message}"):
            watch.main([str(path)])
