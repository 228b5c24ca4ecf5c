"""The view of a run: what it says and draws, of a finished run and of one that goes on."""

import fcntl
import json
import os
import pty
import re
import select

import pytest
import watch
from runs import HANGS, Program

from train_gpt import HERE

RECORD = "2025-01-26_BatchSize"
RULE = "=" * 100


@pytest.fixture
def log(tmp_path):
    """Return write(step), which writes what a run of the record on FineWeb has written by that
    step, and returns the log's path."""

    def write(step: int, name: str = "it"):
        known = json.loads((HERE / "tools" / "published.json").read_text())
        curve = {int(step): loss for step, loss in known[RECORD]["losses"].items()}
        settings = "train_files: fineweb_train_*.bin\nval_files: fineweb_val_*.bin"
        lines = [f"record {RECORD}\non 8 x NVIDIA H100, log in logs/it.txt"]
        rows = []
        for i in range(step + 1):
            ms = 100 * i
            row = {
                "step": i,
                "train_loss": 11 - 0.004 * i,
                "ms": 100.0 + i % 2,
                "tokens_per_s": 3900000,
                "memory_mib": 29000,
            }
            times = f"train_time:{ms}ms step_avg:100.00ms"
            if i:
                lines.append(f"step:{i}/1770 {times}")
            if i in curve:
                lines.append(f"step:{i}/1770 val_loss:{curve[i] + 0.01:.4f} {times}")
                row["val_loss"] = curve[i] + 0.01
            rows.append(row if i else {"step": 0, "val_loss": row["val_loss"]})
        path = tmp_path / f"{name}.txt"
        software = "Python 3\ntorch 2.13.0 CUDA 13"
        parts = ["source", software, "machine", settings, "kernels.py:\nimport triton"]
        path.write_text("".join(f"{p}\n{RULE}\n" for p in parts) + "\n".join(lines) + "\n")
        path.with_suffix(".jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        return path

    return write


def test_a_running_run_shows_where_it_is_and_the_published_curve(log, capsys):
    watch.main([str(log(600))])
    out = capsys.readouterr().out
    words = " ".join(out.split())
    assert f"it.txt: {RECORD} step 600/1770, train loss 8.6000, " in words
    assert "val loss 3.7640 at step 500 (published: 3.7540), lately 100.0 ms/step, 3900.0k" in words
    assert "29000 MiB, 0:01:57 of training left, last heard of" in words
    assert all(name in out for name in ("training", "validation", "published"))
    assert "\x1b" not in out and any(dot in out for dot in "⠉⠒⠤⣀⢇")


def test_a_finished_run_says_so_and_other_data_has_no_published_curve(log, capsys):
    path = log(1770)
    path.write_text(path.read_text().replace("train_files: fineweb_", "train_files: mine_"))
    watch.main([str(path)])
    out = capsys.readouterr().out
    assert "finished, 177.0 s of training" in " ".join(out.split()) and "left" not in out
    assert "published" not in out


def test_a_log_without_rows_and_half_a_row_are_no_trouble(log, capsys):
    path = log(600)
    rows, text = path.with_suffix(".jsonl"), path.read_text()
    rows.write_text(rows.read_text()[:-20])
    watch.main([str(path)])
    assert "step 599/1770" in capsys.readouterr().out
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:251]))
    watch.main([str(path)])  # the run was resumed at 250
    assert "step 250/1770" in (out := capsys.readouterr().out) and "val loss 4.1114 at" in out
    rows.unlink()
    watch.main([str(path)])
    out = capsys.readouterr().out
    assert "step 500/1770, val loss 3.7640 at step 500" in out and "ms/step" not in out
    path.write_text(re.sub("(?m)^step:.*val_loss.*\n", "", text))
    with pytest.raises(SystemExit, match="it.txt has no step yet"):
        watch.main([str(path)])


def test_the_view_shows_the_first_losses_and_a_mark_for_each_validation(log, capsys):
    """Its legend is a line of text above it, and the published losses yet to come are there."""
    watch.main([str(log(600))])
    above, plot = capsys.readouterr().out.split("┌")
    legend = "⠒ training loss   ○ published loss   ● validation loss"
    assert above.splitlines()[-2] == legend
    assert (plot.count("●"), plot.count("○")) == (5, 11)  # at 0 to 500; at 625 to 1750, and 1770
    assert "loss" not in plot
    ticks = {m[1]: m[2] for m in re.finditer(r"(?m)^ *([\d.]+)┤(.*)$", plot)}
    assert ticks["11"].startswith("●")  # the validation of step 0
    drawn = {name: {m.start() for m in re.finditer("[⠀-⣿]", row)} for name, row in ticks.items()}
    places = [min(columns) for columns in drawn.values() if columns]
    assert len(places) >= 3 and places == sorted(places) and places[0] <= 2  # it falls from 11


def test_a_loss_of_zero_has_no_place_on_the_axis(log, capsys):
    path = log(600)
    rows = path.with_suffix(".jsonl")
    rows.write_text(rows.read_text().replace('"train_loss": 8.6,', '"train_loss": 0.0,'))
    watch.main([str(path)])
    assert "train loss 0.0000" in (out := capsys.readouterr().out) and "8┤" in out


@pytest.fixture
def pictures(monkeypatch):
    """Return the figures that are saved while the test runs, as they are then."""
    from matplotlib import figure

    found, save = [], figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, *a, **k: found.append(self) or save(self, *a, **k)
    )
    return found


@pytest.mark.parametrize("step", [3, 600, 1770])
def test_the_picture_shows_every_loss_outside_its_legend(step, log, pictures, tmp_path, capsys):
    """Losses at some steps alone are marks, without a line that looks like losses between them."""
    watch.main([str(log(step)), "--png", str(tmp_path / "it.png")])
    assert capsys.readouterr().out == f"wrote {tmp_path / 'it.png'}\n"
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")
    axis = pictures[0].axes[0]
    lines = {line.get_label(): line for line in axis.get_lines()}
    assert {name: line.get_linestyle() for name, line in lines.items()} == {
        "training": "-",
        "published": "None",
        "validation": "None",
    }
    assert [len(line.get_xdata()) for line in lines.values()] == [
        step,
        16,
        len(range(0, step, 125)) + (step == 1770),
    ]
    panel, legend = axis.get_window_extent(), axis.get_legend().get_window_extent()
    for line in lines.values():
        pixels = axis.transData.transform(line.get_xydata())
        assert all(panel.contains(*pixel) for pixel in pixels)
        assert not any(legend.contains(*pixel) for pixel in pixels)
    heights = [axis.transData.transform((0, tick))[1] for tick in axis.get_yticks()]
    assert len(heights) >= 5 and all(panel.y0 <= height <= panel.y1 for height in heights)


def test_a_long_name_is_wrapped_in_the_picture(log, pictures, tmp_path):
    path = log(3)
    flags = " --layers " + ",".join(["short+v0+pair"] * 20)
    path.write_text(path.read_text().replace(f"record {RECORD}", f"record {RECORD}{flags}"))
    watch.main([str(path), "--png", str(tmp_path / "it.png")])
    title = pictures[0]._suptitle
    assert "".join(title.get_text().split()).endswith(flags.replace(" ", ""))
    box, whole = title.get_window_extent(), pictures[0].bbox
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


def on_terminal(words: list[str], terminal: str) -> None:
    """Watch in a process whose terminal this is."""
    for number in (0, 1, 2):
        os.dup2(os.open(terminal, os.O_RDWR), number)
    watch.main(words)


def test_on_a_terminal_it_follows_the_run_to_its_end(log):
    """It draws anew as the log grows, and leaves by itself."""
    path = log(125)
    terminal, inner = pty.openpty()
    more = [os.ttyname(inner)]
    program = Program([path, "--interval", "0.1"], work=on_terminal, more=more)
    seen, grown = "", False
    while "finished" not in seen:
        ready, _, _ = select.select([terminal], [], [], HANGS)
        assert ready, seen
        seen += os.read(terminal, 65536).decode(errors="replace")
        if not grown and "step 125/1770" in seen:
            log(1770)
            grown = True
    assert program.end() == [0]
    views = re.split(re.escape("\x1b[H\x1b[J"), seen)
    assert "step 125/1770" in views[1] and "finished" in views[-1] and len(views) > 2


def test_a_run_without_a_process_is_drawn_once_more(log, monkeypatch, capsys):
    """A terminal shows a run until it ends, or is stopped; the lock tells."""
    path = log(600)
    monkeypatch.setattr(watch.sys.stdout, "isatty", lambda: True, raising=False)
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        lock.close()

    monkeypatch.setattr(watch.time, "sleep", sleep)
    lock = path.with_suffix(".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert watch.has_process(path)
    watch.main([str(path)])
    assert len(naps) == 1 and capsys.readouterr().out.count("step 600/1770") == 2
    assert not watch.has_process(path) and watch.has_process(path.with_name("public.txt"))
