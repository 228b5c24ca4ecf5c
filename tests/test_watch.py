"""tools/watch.py: what it says and plots of a finished run and of a live one."""

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
                row |= {"tokens_per_s": 3900000, "memory_mib": 29000}
            if i in curve:
                lines.append(f"step:{i}/1770 val_loss:{curve[i] + 0.01:.4f} {times}")
                row["val_loss"] = curve[i] + 0.01
            rows.append(row)
        path = tmp_path / f"{name}.txt"
        software = "Python 3\ntorch 2.13.0 CUDA 13"
        parts = ["source", software, "machine", settings, "kernels.py:\nimport triton"]
        path.write_text("".join(f"{p}\n{RULE}\n" for p in parts) + "\n".join(lines) + "\n")
        path.with_suffix(".jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        return path

    return write


def test_a_view_has_the_state_all_losses_and_a_legend_above_the_plot(log, capsys):
    watch.main([str(log(600))])
    out = capsys.readouterr().out
    above, plot = out.split("┌")
    words = " ".join(above.split())
    assert f"it.txt: {RECORD} step 600/1770, train loss 8.6000, " in words
    assert "val loss 3.7640 at step 500 (published: 3.7540), lately 100.0 ms/step, 3900.0k" in words
    assert "29000 MiB, 0:01:57 of training left, last " in words and "\x1b" not in out
    legend = "⠒ training loss   ○ published loss   ● validation loss"
    assert above.splitlines()[-2] == legend
    assert (plot.count("●"), plot.count("○")) == (5, 11)  # at 0 to 500; at 625 to 1750, and 1770
    ticks = {m[1]: m[2] for m in re.finditer(r"(?m)^ *([\d.]+)┤(.*)$", plot)}
    assert ticks["11"].startswith("●")  # the validation of step 0
    drawn = {name: {m.start() for m in re.finditer("[⠀-⣿]", row)} for name, row in ticks.items()}
    places = [min(columns) for columns in drawn.values() if columns]
    assert len(places) >= 3 and places == sorted(places) and places[0] <= 2  # it falls from 11


def test_a_finished_run_on_other_data_has_no_time_left_and_no_published_curve(log, capsys):
    path = log(1770)
    path.write_text(path.read_text().replace("train_files: fineweb_", "train_files: mine_"))
    watch.main([str(path)])
    out = capsys.readouterr().out
    assert "finished, 177.0 s of training" in " ".join(out.split()) and "left" not in out
    assert "published" not in out


def test_rows_may_be_missing_torn_or_have_a_loss_of_zero(log, capsys):
    path = log(600)
    metrics, text = path.with_suffix(".jsonl"), path.read_text()
    rows = metrics.read_text().splitlines(keepends=True)

    def printed() -> str:
        watch.main([str(path)])
        return capsys.readouterr().out

    metrics.write_text("".join(rows)[:-20])
    assert "step 599/1770" in printed()
    metrics.write_text("".join(rows).replace('"train_loss": 8.6,', '"train_loss": 0.0,'))
    assert "train loss 0.0000" in (out := printed()) and "8┤" in out  # on a logarithmic axis
    metrics.write_text("".join(rows[:251]))  # the run was resumed at 250
    assert "step 250/1770" in (out := printed()) and "val loss 4.1114 at" in out
    metrics.unlink()
    assert "step 500/1770, val loss 3.7640 at step 500" in (out := printed())
    assert "ms/step" not in out
    path.write_text(re.sub("(?m)^step:.*val_loss.*\n", "", text))
    with pytest.raises(SystemExit, match="it.txt has no step yet"):
        printed()


@pytest.mark.parametrize("step", [3, 1770])
def test_the_picture_shows_every_loss_outside_its_legend_and_wraps_a_long_name(
    step, log, monkeypatch, tmp_path, capsys
):
    from matplotlib import figure

    path, picture, saved = log(step), tmp_path / "it.png", []
    flags = " --layers " + ",".join(["short+v0+pair"] * 20)
    path.write_text(path.read_text().replace(f"record {RECORD}", f"record {RECORD}{flags}"))
    save = figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, *a, **k: saved.append(self) or save(self, *a, **k)
    )
    watch.main([str(path), "--png", str(picture)])
    assert capsys.readouterr().out == f"wrote {picture}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")

    axis = saved[0].axes[0]
    lines = {line.get_label(): line for line in axis.get_lines()}
    found = {name: (line.get_linestyle(), len(line.get_xdata())) for name, line in lines.items()}
    validations = len(range(0, step, 125)) + (step == 1770)
    # Losses of some steps alone are marks: a line would look like losses between them.
    assert found == {
        "training": ("-", step),
        "published": ("None", 16),
        "validation": ("None", validations),
    }
    panel, legend = axis.get_window_extent(), axis.get_legend().get_window_extent()
    for line in lines.values():
        pixels = axis.transData.transform(line.get_xydata())
        assert all(panel.contains(*pixel) for pixel in pixels)
        assert not any(legend.contains(*pixel) for pixel in pixels)
    heights = [axis.transData.transform((0, tick))[1] for tick in axis.get_yticks()]
    assert len(heights) >= 5 and all(panel.y0 <= height <= panel.y1 for height in heights)

    title = saved[0]._suptitle
    assert "".join(title.get_text().split()).endswith(flags.replace(" ", ""))
    box, whole = title.get_window_extent(), saved[0].bbox
    assert whole.x0 <= box.x0 and box.x1 <= whole.x1


def test_without_a_name_it_is_the_newest_log_and_errors_are_a_line(log, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="watch.py: no log under logs/: name one"):
        watch.main([])
    (tmp_path / "logs").mkdir()
    log(3, "logs/old")
    (tmp_path / "logs/new.txt").write_text("nothing")
    os.utime(tmp_path / "logs/old.txt", (1, 1))
    with pytest.raises(SystemExit, match="watch.py: logs/new.txt has no line of a step"):
        watch.main([])


@pytest.mark.parametrize("last", [1770, 600])
def test_a_terminal_follows_a_live_run_until_it_finishes_or_its_process_ends(
    last, log, monkeypatch, capsys
):
    """A run's process holds the lock beside its log."""
    path = log(125)
    lock = path.with_suffix(".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert watch.has_process(path) and watch.has_process(path.with_name("public.txt"))
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        log(600 if len(naps) == 1 else last)
        if len(naps) == 2 and last < 1770:
            lock.close()

    monkeypatch.setattr(watch.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(watch.time, "sleep", sleep)
    watch.main([str(path), "--interval", "0.5"])
    assert naps == [0.5, 0.5]
    views = capsys.readouterr().out.split("\x1b[H\x1b[J")[1:]
    steps = [re.search(r"step (\d+)/1770", view)[1] for view in views]
    assert steps == ["125", "600", str(last)] and ("finished" in views[-1]) == (last == 1770)
    assert watch.has_process(path) == (last == 1770)
