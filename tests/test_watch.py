"""tools/watch.py: what it says and plots of a finished run and of a live one."""

import json
import os
import re
import time

import pytest
import watch

from train_gpt import HERE

RECORD = "2025-01-26_BatchSize"
RULE = "=" * 100


@pytest.fixture
def log(tmp_path):
    """Return write(step), which writes the log of a run of the record up to that step."""

    def write(step: int, name: str = "it"):
        known = json.loads((HERE / "tools" / "published.json").read_text())
        curve = {int(step): loss for step, loss in known[RECORD]["losses"].items()}
        settings = "train_files: fineweb_train_*.bin\nval_files: fineweb_val_*.bin"
        lines = [f"record {RECORD}\non 8 x NVIDIA H100, log in logs/it.txt"]
        rows = []
        for i in range(step + 1):
            times = f"train_time:{100 * i}ms step_avg:100.00ms"
            row = {"step": i}
            if i:
                lines.append(f"step:{i}/1770 {times}")
                row |= {"train_loss": 11 - 0.004 * i, "ms": 100.0 + i % 2}
                row |= {"tokens_per_s": 3900000}
            if i in curve:
                lines.append(f"step:{i}/1770 val_loss:{curve[i] + 0.01:.4f} {times}")
                row["val_loss"] = curve[i] + 0.01
            rows.append(row)
        path = tmp_path / f"{name}.txt"
        software = "Python 3\ntorch 2.13.0 CUDA 13"
        parts = ["source", software, "machine", settings, "gpu_kernels.py:\nimport triton"]
        path.write_text("".join(f"{p}\n{RULE}\n" for p in parts) + "\n".join(lines) + "\n")
        path.with_suffix(".jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        return path

    return write


def test_a_view_has_the_state_and_all_losses(log, capsys):
    watch.main([str(log(600))])
    out = capsys.readouterr().out
    above, plot = out.split("┌")
    words = " ".join(above.split())
    assert f"it.txt: {RECORD} step 600/1770, train loss 8.6000, " in words
    assert "val loss 3.7640 at step 500 (published: 3.7540), lately 100.0 ms/step, 3900.0k" in words
    assert "0:01:57 of training left, last " in words and "\x1b" not in out
    assert (plot.count("●"), plot.count("○")) == (5, 11)  # at 0 to 500; at 625 to 1750, and 1770


def test_a_finished_run_on_other_data_has_no_time_left_and_no_published_curve(log, capsys):
    path = log(1770)
    path.write_text(path.read_text().replace("train_files: fineweb_", "train_files: mine_"))
    watch.main([str(path)])
    out = capsys.readouterr().out
    assert "finished, 177.0 s of training" in " ".join(out.split()) and "left" not in out
    assert "published" not in out


def test_rows_may_be_missing_or_torn(log, capsys):
    path = log(600)
    metrics = path.with_suffix(".jsonl")
    rows = metrics.read_text().splitlines(keepends=True)

    def printed() -> str:
        watch.main([str(path)])
        return capsys.readouterr().out

    metrics.write_text("".join(rows)[:-20])
    assert "step 599/1770" in printed()
    again = [rows[249], json.dumps({"step": 250, "train_loss": 9.0}), "\n", '{"step": 250, "ms"']
    metrics.write_text("".join([*rows[:400], *again, "\n\n", rows[250]]))  # it resumed at 248
    assert "step 250/1770, train loss 10.0000, val loss 4.1114 at" in " ".join(printed().split())
    metrics.unlink()
    assert "step 500/1770, val loss 3.7640 at step 500" in printed()


def test_the_picture_shows_every_loss(log, monkeypatch, tmp_path):
    from matplotlib import figure

    picture = tmp_path / "it.png"
    saved = []
    save = figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, *a, **k: saved.append(self) or save(self, *a, **k)
    )
    watch.main([str(log(600)), "--png", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = saved[0].axes[0].get_lines()
    found = {line.get_label(): len(line.get_xdata()) for line in lines}
    assert found == {"training": 600, "published": 16, "validation": 5}


def test_without_a_name_it_is_the_newest_log(log, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    log(3, "logs/old")
    (tmp_path / "logs/new.txt").write_text("nothing")
    os.utime(tmp_path / "logs/old.txt", (1, 1))
    with pytest.raises(SystemExit, match="watch.py: logs/new.txt has no line of a step"):
        watch.main([])


@pytest.mark.parametrize("last", [1770, 600])
def test_a_terminal_follows_a_live_run_until_it_finishes_or_is_quiet_for_ten_minutes(
    last, log, monkeypatch, capsys
):
    path = log(125)
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        log(600 if len(naps) == 1 else last)
        if len(naps) == 2 and last < 1770:
            os.utime(path, (time.time() - 601,) * 2)

    monkeypatch.setattr(watch.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(watch.time, "sleep", sleep)
    watch.main([str(path), "--interval", "0.5"])
    assert naps == [0.5, 0.5]
    views = capsys.readouterr().out.split("\x1b[H\x1b[J")[1:]
    steps = [re.search(r"step (\d+)/1770", view)[1] for view in views]
    assert steps == ["125", "600", str(last)] and ("finished" in views[-1]) == (last == 1770)
