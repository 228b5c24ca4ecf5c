"""tools/watch.py: what it says and plots of a finished run and of a live one."""

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
        for i in range(step + 1):
            times = f"train_time:{100 * i}ms step_avg:100.00ms"
            lines += [f"step:{i}/1770 {times}"] * (i > 0)
            if loss := known["losses"].get(str(i)):
                lines.append(f"step:{i}/1770 val_loss:{loss + 0.01:.4f} {times}")
        for i in range(1, step + 1):
            row = {"step": i, "train_loss": 11 - 0.004 * i, "ms": 100.0, "tokens_per_s": 3900000}
            rows.append(row)
        settings = f"train_files: {data}_train_*.bin\nval_files: {data}_val_*.bin"
        path = tmp_path / f"{name}.txt"
        path.write_text(f"\n{RULE}\n".join(["source", "torch 2", settings, "\n".join(lines)]))
        path.with_suffix(".jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        return path

    return write


def test_a_view_has_the_state_and_all_losses(log, capsys):
    watch.main([str(log(600))])
    out = capsys.readouterr().out
    above, plot = out.split("┌")
    words = " ".join(above.split())
    assert f"it.txt: {RECORD} step 600/1770, train loss 8.6000, " in words
    assert "val loss 3.7628 at step 500 (published: 3.7528), lately 100.0 ms/step, 3900.0k" in words
    assert "0:01:57 of training left, last " in words and "\x1b" not in out
    assert (plot.count("●"), plot.count("○")) == (5, 11)  # at 0 to 500; at 625 to 1750, and 1770


def test_a_finished_run_on_other_data_has_no_time_left_and_no_published_curve(log, capsys):
    watch.main([str(log(1770, data="mine"))])
    out = capsys.readouterr().out
    assert "finished, 177.0 s of training" in " ".join(out.split()) and "left" not in out
    assert "published" not in out


def test_rows_may_be_missing_or_torn(log, capsys):
    path = log(600)
    metrics = path.with_suffix(".jsonl")
    rows = metrics.read_text().splitlines(keepends=True)
    again = [rows[249], json.dumps({"step": 250, "train_loss": 9.0}), "\n", '{"step": 250, "ms"']
    cases = {
        "step 599/1770": "".join(rows)[:-20],
        "step 250/1770, train loss 10.0000, val loss 4.1216 at step 250": "".join(
            [*rows[:400], *again, "\n\n", rows[250]]  # it resumed at 248
        ),
        "step 500/1770, val loss 3.7628 at step 500": "",
    }
    for words, text in cases.items():
        metrics.write_text(text)
        watch.main([str(path)])
        assert words in " ".join(capsys.readouterr().out.split())


def test_without_a_name_it_is_the_newest_log_and_an_error_is_a_line(log, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    log(3, "logs/old")
    (tmp_path / "logs/new.txt").write_text("nothing")
    os.utime(tmp_path / "logs/old.txt", (1, 1))
    with pytest.raises(SystemExit, match="^watch.py: logs/new.txt: has no line of a step"):
        watch.main([])
    with pytest.raises(SystemExit, match="^watch.py: logs: Is a directory$"):
        watch.main(["logs"])


def test_a_terminal_follows_a_live_run_until_it_finishes(log, monkeypatch, capsys):
    path, later = log(125), iter([600, 1770])
    monkeypatch.setattr(watch.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: log(next(later)))
    watch.main([str(path)])
    views = capsys.readouterr().out.split("\x1b[H\x1b[J")[1:]
    steps = [re.search(r"step (\d+)/1770", view)[1] for view in views]
    assert steps == ["125", "600", "1770"] and "finished" in views[-1]
