"""tools/leaderboard.py and tools/submission.py on made-up logs: ours, and those of the public
project."""

import math
import re
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import leaderboard
import logfile
import significance
import submission
import train_gpt
import train_gpt_track3 as track
from conftest import files_here
from logfile import RULE

FLAGS, RECORD = " --muon_lr 0.06", "2025-01-26_BatchSize"
TRACK3 = " --context_len 1024 --model_dim 768 --num_layers 12 --val_tokens 10485760"
GPU = "|   {i}  NVIDIA H100 80GB HBM3          On  |   00000000:18:00.0 Off |             0 |"
GPUS = "\n".join(GPU.format(i=i) for i in range(8))


def ours(
    loss: float = 3.28,
    ms: float = 100.0,
    source: str = "import torch",
    flags: str = "",
    files: dict[str, str] | None = None,
    steps: int = 4,
    inside: str = "",
    **machine,
) -> str:
    """Return the log of a run of a few steps by this project; `files` are those that it imports,
    and settings `inside` the source are not flags."""
    settings = {"num_iterations": str(steps), "muon_lr": "0.05", "seed": "0", "val_loss_every": "2"}
    settings |= {"train_files": "data/fineweb10B/fineweb_train_*.bin"}
    settings |= {"val_files": "data/fineweb10B/fineweb_val_*.bin"}
    settings |= dict(re.findall(r"--(\w+) (\S+)", flags + inside))
    lines = [f"record {RECORD}{flags}"]
    lines += [f"on {machine.get('gpu', '8 x NVIDIA H100 80GB HBM3')}, log in logs/a.txt"]
    lines += [f"kernels: {machine.get('kernels', 'none, on a CPU')}"]
    lines += [f"step:0/{steps} val_loss:10.82580 train_time:0ms step_avg:0.00ms"]
    for step in range(1, steps + 1):
        times = f"train_time:{step * ms:.0f}ms step_avg:{ms:.2f}ms"
        lines += [f"step:{step}/{steps} {times}"]
        if step % 2 == 0:
            lines += [f"step:{step}/{steps} val_loss:{loss + steps - step:.5f} {times}"]
    lines += ["peak memory allocated: 29898 MiB reserved: 44552 MiB"]
    software = f"Python 3.12.1\ntorch {machine.get('torch', '2.13.0')} CUDA 12.8"
    table = "\n".join(f"{name}: {value}" for name, value in settings.items())
    others = [f"{name}:\n{text}" for name, text in (files or {}).items()]
    parts = [source, software, GPUS, table, *others, "\n".join(lines)]
    return f"\n{RULE}\n".join(parts) + "\n"


def group(letter: str, flags="", losses=(3.271, 3.272, 3.273), ms=100.0, **more) -> dict[str, str]:
    """Return logs of runs with seeds 0, 1, ... by name; the times differ by 4 ms."""
    return {
        f"logs/{letter}{i}.txt": ours(loss, ms + i, flags=f"{flags} --seed {i}", **more)
        for i, loss in enumerate(losses)
    }


# What a resumed run says of what it has replaced, at each start.
OTHERS = "".join(
    f"the {name} is not the one with which this run began\n"
    for name in ("source", "train_files", "source")
)
# A file of which a log has a part: its lines look like other parts of a log.
FILES = {
    "gpu_kernels.py": f"import triton\ntorch 1.0\n| 0  NVIDIA T4  On |\n{GPUS}\n{OTHERS}muon_lr: 9"
}


def of_2024(loss: float = 3.2783) -> str:
    """Return a public log of 2024: a rule first, train losses, a clock that starts again."""
    source = f"import os\nprint0('{'=' * 99}')"
    software = (
        f"Running pytorch 2.6.0.dev20241119+cu124 compiled for CUDA 12.4\nnvidia-smi:\n{GPUS}"
    )
    lines = ["step:0/1875 val_loss:10.8258 train_time:0ms step_avg:nanms"]
    for step in (1, 10, 1875):
        lines += [f"step:{step}/1875 train_loss:10.8258 train_time:{step * 160}ms step_avg:nanms"]
    lines += [f"step:1875/1875 val_loss:{loss:.4f} train_time:301825ms step_avg:161.84ms"]
    return "\n".join([RULE, source, RULE, software, "", RULE, "Training", RULE, *lines])


def of_2025(loss: float = 3.2808) -> str:
    """Return a public log of 2025: step_avg is nan at first."""
    software = f"Running Python 3.10.12\nRunning PyTorch 2.7.0.dev20250125+cu126 compiled\n{GPUS}"
    lines = ["step:0/1770 val_loss:10.8258 train_time:0ms step_avg:nanms"]
    lines += ["step:1/1770 train_time:24286ms step_avg:nanms"]
    lines += [f"step:1770/1770 val_loss:{loss:.4f} train_time:176003ms step_avg:100.00ms"]
    lines += ["peak memory allocated: 29898 MiB reserved: 44552 MiB"]
    return "\n".join(["import os", RULE, software, RULE, *lines])


@pytest.fixture
def board(tool):
    """Return call(files, *flags): it calls the tool with logs of these names and texts."""
    return lambda files, *flags: tool(leaderboard.main, [*files, *flags], files)


def rows_of(out: str) -> list[list[str]]:
    """Return the rows of both tables, their cells split where two blanks are."""
    lines = [line for line in out.splitlines() if re.match(r"\w+  ", line)]
    return [re.split(r"  +", line) for line in lines if not line.startswith("group")]


def test_our_logs_and_public_ones_are_read(board):
    """The first is ours, and lies in the folder of another record. The second has other steps than
    the record of its folder, and is named twice. z.txt is a public log without a source, and with
    seconds."""
    folder, uuid = "2025-01-26_BatchSize", "8384493d-dba9-4991-b16b-8696953f5e6d"
    place = "2024-11-24_WindowWarmup/a.txt"
    files = {place: ours(steps=1750, flags=FLAGS), f"{folder}/this_pr/{uuid}.txt": of_2024()}
    files[f"{folder}/y.txt"] = of_2025()
    files["z.txt"] = "step:2/2 val_loss:3.27888 train_time:618.893s step_avg:196.60ms\n"
    status, out, err = board(files, f"./{folder}/this_pr/{uuid}.txt")
    assert (status, err) == (0, "")
    gpu, memory, record = "8 x NVIDIA H100 80GB HBM3", "29898/44552", "2025-01-26_BatchSize"
    a, _, y, z = files
    assert out.splitlines()[:4] == [
        f"A: {record}{FLAGS}, torch 2.13.0, {gpu}",
        f"B: this_pr, torch 2.6.0.dev20241119+cu124, {gpu}",
        f"C: {record}, torch 2.7.0.dev20250125+cu126, {gpu}",
        "D: z",
    ]
    assert rows_of(out)[:4] == [
        ["A", "1750", "3.28000", "175.00", "100.00", memory, a],
        ["B", "1875", "3.2783", "301.82", "161.84", "-", f"this_pr/{uuid}.txt"],
        ["C", "1770", "3.2808", "176.00", "100.00", memory, y],
        ["D", "2", "3.27888", "618.89", "196.60", "-", z],
    ]
    assert max(map(len, out.splitlines())) <= 120


def test_each_group_is_tested_against_its_records_target(board):
    """medium.txt is a public log of GPT-2 medium, whose folder has the date alone. A group is
    compared with one of its own target and steps only."""
    lines = ["step:0/7500 val_loss:10.8258 train_time:0ms step_avg:nanms"]
    lines += ["step:7500/7500 val_loss:2.9166 train_time:1756892ms step_avg:234.57ms"]
    other = of_2024().replace("1875/1875", "1750/1750").replace("/1875", "/1750")
    files = group("a", steps=1750) | {
        "2025-01-18/small.txt": other,
        "2025-01-18/medium.txt": "\n".join(["import os", RULE, "", RULE, *lines]),
        "m.txt": ours(steps=1750, inside=" --num_layers 16").replace(RECORD, "medium_2025-01-18"),
    }
    out = board(files)[1]
    clocks = "A (but one of the clocks does not count the first ten steps)"
    assert re.findall(" than (.*?);", out) == [clocks]
    titles = [line.split() for line in out.splitlines() if line.startswith("group  n")]
    assert [title[4] for title in titles] == ["p(<=3.28)", "p(<=2.92)"]
    small, unknown, medium, _ = rows_of(out)[-4:]
    assert re.findall(r"^[BC]: ([^,\n]+)", out, re.M) == ["2025-01-18", "medium_2025-01-18"]
    assert unknown[1] == "1"
    assert float(small[4]) == pytest.approx(
        stats.ttest_1samp([3.271, 3.272, 3.273], 3.28, alternative="less").pvalue, rel=0.01
    )
    assert medium[-1] == "+0.00340"
    assert "p(<=2.9)" in board(files, "--target", 2.9)[1]


def test_a_resumed_run_is_one_run_and_its_later_steps_count(board):
    """Its kernels may change. What the start before said of its warm-up and its end is past."""
    begun = "kernels: {}\ncompilation and warm-up, not part of train_time: {} s\n"
    again = ours(3.1, ms=200).split("log in logs/a.txt\n")[1].split("step:1/4")[1]
    again = "step:1/4 val_loss:3.5 train_time:1ms step_avg:1.00ms\nstep:1/4" + again
    first = ours(3.28).replace("kernels: none, on a CPU\n", begun.format("relu2_mlp", 9.0))
    first += "saved; resume with cd /a && b\n"
    logs = {"a.txt": first + OTHERS + begun.format("chunk_loss", 2.5) + again}
    out = board(logs)[1]
    assert "\na.txt was resumed with another source and train_files\n" in out
    assert [row[2:4] for row in rows_of(out)[:-1]] == [["3.10000", "0.80"]]
    run = logfile.read_log(Path("a.txt"))
    assert [*run.curve] == [0, 1, 2, 4] and run.kernels == "relu2_mlp; chunk_loss"
    assert run.resume == ""
    assert [row[2:4] for row in rows_of(board(logs, "--at", 2)[1])[:-1]] == [["5.10000", "0.40"]]


@settings(max_examples=200, deadline=None)
@given(
    text=st.sampled_from([of_2025(3.28), ours(), ours(files=FILES), of_2024(3.28)]), data=st.data()
)
def test_a_log_cut_anywhere_is_refused_or_read_right(tmp_path_factory, text, data):
    """At a character, or where lines are missing."""
    path = tmp_path_factory.getbasetemp() / "cut.txt"
    lines = text[: data.draw(st.integers(0, len(text)))].splitlines(keepends=True)
    begin = data.draw(st.integers(0, len(lines)))
    path.write_text("".join(lines[:begin] + lines[data.draw(st.integers(begin, len(lines))) :]))
    try:
        run = logfile.read_log(path)
    except ValueError:
        return
    assert run.loss == 3.28 and run.steps in (4, 1770, 1875)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (ours().replace("val_loss:3.28000", "val_loss:nan"), "has a loss of nan at step 4"),
        (ours().split("step:4/4")[0], "is truncated: it ends at step 3 of 4: --at 2 reads"),
    ],
)
def test_what_cannot_be_used_is_named_in_one_line(board, content, line):
    status, out, err = board({"good.txt": ours(), "bad.txt": content})
    assert status == 1 and err.count("\n") == 1 and err.startswith("leaderboard.py: ")
    assert line in err and len(rows_of(out)) == 2  # a row for the run and one for its group


def test_runs_of_a_group_differ_only_in_settings_of_one_run(board):
    files = {
        "a.txt": ours(),
        "b.txt": ours(flags=" --seed 5 --val_loss_every 4"),
        "c.txt": ours(source="import numpy"),
        "d.txt": ours(flags=FLAGS),
        "e.txt": ours(torch="2.11.0"),
        "f.txt": ours(files=FILES),
        "g.txt": ours(3.3),
    }
    out = board(files)[1]
    assert [row[0] for row in rows_of(out)] == [*"AAABCDE", *"ABCDE"]
    assert "A has a seed twice" in out and "resumed" not in out
    many = [SimpleNamespace(group=i) for i in range(28)]
    assert [*leaderboard.groups_of(many)][24:] == ["Y", "Z", "G26", "G27"]


def test_two_groups_are_compared_by_welch_in_a_plain_sentence(board):
    """Not with longer runs."""
    losses = [3.2780, 3.2790, 3.2772, 3.2786], [3.2795, 3.2785, 3.2801, 3.2790, 3.2791]
    ms = [404, 405, 403, 404], [396, 398, 396, 396, 397]
    files = group("longer", ms=80.0, steps=6)
    for name, flags, runs in zip("ab", ("", FLAGS), zip(losses, ms, strict=True), strict=True):
        for i, (loss, time) in enumerate(zip(*runs, strict=True)):
            files[f"{name}{i}.txt"] = ours(loss, time / 4, flags=f"{flags} --seed {i}")
    status, out, _ = board(files, "--target", 3.279)
    rows = rows_of(out)
    assert status == 0 and "\nC: 2025-01-26_BatchSize --muon_lr 0.06, torch" in out
    p = stats.ttest_1samp(losses[0], 3.279, alternative="less").pvalue
    assert rows[-2][1:5] == ["4", "3.27820", f"{np.std(losses[0], ddof=1):.5f}", f"{p:.3f}"]
    of_loss, of_time = (stats.ttest_ind(b, a, equal_var=False) for a, b in (losses, ms))
    (low, high), (least, most) = of_loss.confidence_interval(), of_time.confidence_interval()
    percent = 100 / np.mean(ms[0])
    faster, by = -percent * (least + most) / 2, percent * (most - least) / 2
    assert [line for line in out.splitlines() if "faster" in line or "slower" in line] == [
        f"C is {faster:.1f} % ± {by:.1f} % faster than B; "
        f"its loss is {(low + high) / 2:.4f} ± {(high - low) / 2:.4f} higher; "
        f"the difference in loss is not significant (p = {of_loss.pvalue:.3f} > 0.01); "
        "--compare tests after each pair of runs"
    ]


def test_two_comparisons_share_the_chance_of_a_false_answer(board):
    losses = np.array([3.2780, 3.2784, 3.2788, 3.2792])
    p = stats.ttest_ind(losses, losses + 0.0014, equal_var=False).pvalue
    two = group("a", "", losses) | group("b", FLAGS, losses + 0.0014)
    assert f"is significant (p = {p:.2e} < 0.01)" in board(two)[1]
    out = board(two | group("c", " --muon_lr 0.07", losses + 0.0014))[1]
    assert out.count(f"is not significant (p = {p:.2e} > 0.005)") == 2


def test_the_picture_has_the_target_and_the_losses_of_all_steps(board, monkeypatch):
    """Each training loss is the mean of the last fortieth of all. A resumed run has repeated steps,
    and its last loss is not finite; a line is being written."""
    figures, losses = [], np.append(np.linspace(5, 3.3, 79), np.nan)
    rows = [{"step": i + 1, "train_loss": loss, "ms": 500} for i, loss in enumerate(losses)]
    rows[7:7] = [{"step": 90, "train_loss": 9.0, "ms": 1}, {"step": 7, "val_loss": 4.0}]
    Path("logs").mkdir()
    lines = [*map(train_gpt.to_json, rows), '{"step": 8']
    Path("logs/a0.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(significance, "save", lambda figure, path: figures.append(figure))
    logs = group("a") | group("b", FLAGS, (3.281, 3.282, 3.283))
    assert board(logs, "--plot", "curves.png")[2] == ""
    (figure,) = figures
    by_time, by_step = figure.axes
    steps, means = np.arange(2, 81), (losses[:-1] + losses[1:]) / 2
    for axes, unit in ((by_time, 0.5), (by_step, 1)):
        (thin,) = [line.get_xydata() for line in axes.lines if line.get_linewidth() == 0.7]
        np.testing.assert_allclose(thin, np.stack([unit * steps, means], 1))
    for axes in figure.axes:
        assert any({*line.get_ydata()} == {3.28} for line in axes.lines)
    low, high = by_step.get_ylim()
    assert by_time.get_ylim() == (low, high) and low < 3.271 and high > np.nanmax(means)


def trial(losses: dict[int, float], steps: int) -> str:
    """Return the lines of a trial of the benchmark: seconds, five digits, a second loss, and
    more."""
    lines = []
    for step, loss in losses.items():
        times = f"train_time:{step / 7:.3f}s step_avg:{142.86 if step else math.nan:.2f}ms"
        ema = f"val_ema_loss:{loss - 0.004:.5f}"
        lines += [f"step:{step}/{steps} val_loss:{loss:.5f} {ema} {times} handoff:keep"]
    return "\n".join(["logs/1234.txt is here", *lines, "stray: text\n"])


def of_benchmark(*trials: str, source: str = "import os") -> str:
    """Return a public log of the benchmark, of one trial or of several."""
    software = "Running PyTorch 2.10.0+cu128 compiled for CUDA 12.8"
    software += " on NVIDIA H100 80GB HBM3 with world_size 8"
    return "\n".join([source, RULE, software, RULE, *trials])


def test_trials_in_one_log_are_runs_and_have_the_benchmarks_statistic(board):
    """A trial begins where the step decreases, even if there is no line of step 0. A result may be
    claimed before the last step, and for another loss."""
    results = {"old": (3.2788, 20, 3375), "new": (3.2790, 10, 3325)}
    logs = {}
    for name, (loss, count, steps) in results.items():
        trials = [trial({125: 3.4, steps: loss}, steps)] * count
        logs[f"{name}.txt"] = of_benchmark(*trials, source=name)
    status, out, err = board(logs)
    rows = rows_of(out)
    assert (status, err) == (0, "") and out.startswith("A: old, torch 2.10.0+cu128, 8 x NVIDIA H1")
    assert [row[1] for row in rows[:-2]] == ["3375"] * 20 + ["3325"] * 10
    for row, (loss, count, _) in zip(rows[-2:], results.values(), strict=True):
        assert row[1:3] == [str(count), f"{loss:.5f}"]
        assert row[-1] == f"{(3.28 - loss) * count**0.5:+.5f}"
    rows = rows_of(board(logs, "--at", 125, "--field", "val_ema_loss")[1])
    assert [row[1:3] for row in rows[:-2]] == 30 * [["125", "3.39600"]]


def test_one_run_has_a_p_if_the_deviation_is_known(board):
    """Nothing is taken from the average time at step 0, which is nan."""
    groups, logs = {"a": (3.2781, 3.2790, 3.2787), "b": (3.2768,)}, {}
    for name, losses in groups.items():
        for i, loss in enumerate(losses):
            curve = {0: 10.8, 2690: loss} if name == "a" else {2690: loss}
            logs[f"{name}{i}.txt"] = of_benchmark(trial(curve, 2690), source=name)
    assert board(logs, "--deviation", 0)[0] == 1
    out = board(logs, "--deviation", 0.0013)[1]
    assert "clocks" not in out
    for row, losses in zip(rows_of(out)[-2:], groups.values(), strict=True):
        z = (np.mean(losses) - 3.28) / (0.0013 / len(losses) ** 0.5)
        assert float(row[4]) == pytest.approx(NormalDist().cdf(z), rel=2e-2)
    error, by = 0.0013 * (1 / 3 + 1) ** 0.5, 3.2768 - np.mean(groups["a"])
    assert f"{-by:.4f} ± {1.96 * error:.4f} lower" in out


NAME = "2026-11-22_Trick"
PAIR = group("a") | group("b", inside=FLAGS, ms=90.0)
# In a bundle, imports of modules are in texts.
BUNDLE = 'Bundled("mine", r"""import pytorch_optimizer, torch""")\nimport mine, heavyball.x, os'


@pytest.fixture
def submit(tool):
    """Return call(files), which makes the folder of these logs, and returns the status, README.md
    or "", and the console's lines or the error."""

    def call(files: dict[str, str], folder: str = NAME, *flags) -> tuple[int, str, str]:
        status, out, err = tool(submission.main, [folder, *files, *flags], files)
        readme = Path(folder, "README.md")
        return status, readme.read_text("utf-8") if readme.exists() else "", err or out

    return call


def test_the_folder_holds_the_logs_of_both_groups(submit):
    status, readme, _ = submit(PAIR)
    logs = [f"baseline/a{i}.txt" for i in range(3)] + [f"this_pr/b{i}.txt" for i in range(3)]
    assert status == 0 and files_here() == {*PAIR, *(f"{NAME}/{p}" for p in [*logs, "README.md"])}
    for copy, text in zip(logs, PAIR.values(), strict=True):
        assert Path(NAME, copy).read_text() == text
    assert "`diff baseline/a0.txt this_pr/b0.txt`" in readme
    assert "  baseline/a0.txt\n" in readme and "logs/" not in readme
    assert "an interval and p need 4 runs" in readme and "signif" not in readme


def test_figures_and_verdict_are_those_of_a_public_readme(submit):
    """That of the public record 2026-01-18_UnifiedOptimizers, whose times are in milliseconds."""
    losses = [3.2781, 3.2803, 3.2767, 3.2799, 3.2794, 3.2767, 3.2767, 3.2780]
    times = [104649, 104442, 104243, 104454, 104486, 104322, 104655, 104412]
    published = [8, 3.2782, 0.0015, 0.0060, 104.4579, 0.1430]
    files = {}
    for i, (loss, ms) in enumerate(zip(losses, times, strict=True)):
        files[f"{i}.txt"] = ours(loss, ms / 4, flags=f" --seed {i}")
    _, readme, out = submit(files)
    row = next(row for row in rows_of(readme) if row[0] == "this_pr" and row[1] == "8")
    assert [float(x) for x in row[1:7]] == pytest.approx(published, rel=1e-3, abs=6e-3)
    rule = "Rule 2 is met: the mean loss is at most 3.28 with p = 5.96e-03 < 0.01."
    assert rule in readme and rule in out


@pytest.mark.parametrize(
    ("inside", "losses", "rule"),
    [
        ("", [3.279, 3.2800], "Rule 2 is not met: p = 0.250 "),
        (TRACK3, [3.2779, 3.2781] * 2, "rule 3 is met at step 4: (3.28 - mean loss) sqrt(4) ="),
        (TRACK3, [3.2771, 3.2774], "rule 3 is not met at step 4: "),
        (f"{TRACK3} --batch_seqs 16 --seq_len 32768", [3.27], "rule 3 is met at step 4: "),
        (f"{TRACK3} --init_from a.pt", [3.27], "rule 1 is not met: --init_from a.pt."),
        (" --context_len 256", [3.27], "rule 1 is not met: --context_len 256, not 1024"),
    ],
)
def test_a_rule_is_met_or_not(inside, losses, rule, submit):
    status, readme, out = submit(group("a", "", losses, inside=inside))
    assert status == 0 and rule in readme and rule in out


@pytest.mark.parametrize(
    ("files", "note"),
    [
        (
            {"a.txt": ours().replace("step:3/4 ", f"{OTHERS}step:3/4 ")},
            "a.txt does not repeat its run, as the rules want: the run was resumed with another "
            "source and train_files.",
        ),
        (PAIR | group("b", inside=FLAGS), "Not faster: by rule 4"),  # as long as the baseline
        (PAIR | group("b", inside=FLAGS, torch="2.12.0"), "GPU or PyTorch differs: rule 4"),
        (PAIR | group("b", inside=FLAGS, gpu="8 x NVIDIA H200"), "GPU or PyTorch differs: rule 4"),
        (PAIR | group("b", inside=f"{FLAGS} --val_files mine.bin"), "Not FineWeb: rule 1 "),
        (group("a", "", [3.27], inside=TRACK3, source=BUNDLE), "heavyball, pytorch_optimizer."),
    ],
)
def test_what_may_keep_a_submission_out_is_noted_in_readme_and_on_the_console(files, note, submit):
    status, readme, out = submit(files)
    notes = readme.partition("## Notes\n\n- ")[2]
    assert status == 0 and note in notes and note in out


def test_the_earliest_step_that_passes_may_be_claimed(submit):
    early, last = (3.2775, 3.2777, 3.2776, 3.2778), (3.2780, 3.2782, 3.2781, 3.2783)
    files = group("a", "", last, inside=TRACK3)
    for (name, text), a, b in zip(files.items(), early, last, strict=True):
        files[name] = text.replace(f"val_loss:{b + 2:.5f}", f"val_loss:{a:.5f}")
    files[name] = files[name].replace("step:1/4 ", "step:1/4 val_loss:3.20000 ")  # of one run alone
    _, readme, out = submit(files)
    assert (
        f"not met at step 4: (3.28 - mean loss) sqrt(4) = {2 * (3.28 - np.mean(last)):.5f}" in out
    )
    hint = (
        f"met at step 2, with {2 * (3.28 - np.mean(early)):.5f}: by the benchmark's rule 5, --at 2"
    )
    assert hint in readme and hint in out
    _, readme, _ = submit(files, "other", "--at", 2)
    assert "rule 3 is met at step 2: " in readme and "Notes" not in readme
    assert "error: --at: " in submit(group("b"), "third", "--at", 2)[2]
    assert "error: --at 0: " in submit(files, "third", "--at", 0)[2]


def test_a_source_that_repeats_its_run_without_flags_is_accepted(submit):
    """Flags may say where the data is, and how often to validate."""
    flags = " --val_files d/fineweb_val_*.bin --val_loss_every 2"
    files = group("a", flags, source=Path(train_gpt.__file__).read_text())
    assert submit(files)[0] == 0


def test_a_record_of_another_target_is_judged_by_it(submit):
    losses = 2.917, 2.919, 2.921
    files = group("m", "", losses, inside=" --num_layers 16")
    names = "2025-01-26_BatchSize", "medium_2025-01-18"
    medium = {path: text.replace(*names) for path, text in files.items()}
    p = stats.ttest_1samp(losses, 2.92, alternative="less").pvalue
    readme = submit(medium)[1]
    assert f"Rule 2 is not met: p = {p:.3f}" in readme and "p(<=2.92)" in readme
    status, _, error = submit(group("a") | medium, "other")
    assert status == 1 and "different targets: " in error
    status, readme, _ = submit(medium, "third", "--target", 2.95)
    assert status == 0 and "the mean loss is at most 2.95 with p" in readme


def test_records_of_the_benchmark_keep_to_all_that_rule_1_fixes():
    """Demos do not. A wider MLP shows only in the number of parameters."""
    for name, hp in track.RECORDS.items():
        settings = {key: train_gpt.show(value) for key, value in vars(hp).items()}
        run = logfile.Run(Path(), settings=settings, parameters=162_354_816)
        assert run.is_of_benchmark and bool(run.against_benchmark) == ("demo" in name), name
    run = logfile.Run(Path(), settings={"context_len": "1024"}, parameters=171_799_296)
    assert run.against_benchmark == ["171799296 parameters, not 162354816"]
    assert run.known_deviation is None
    names = "context_len num_layers num_heads head_dim model_dim vocab_size attn_scale rope"
    names += " rope_base norm_eps logit_softcap val_tokens epochs init_from train_files val_files"
    for name in names.split():
        settings = {"context_len": "1024", name: "other"}
        (found,) = logfile.Run(Path(), settings=settings).against_benchmark
        assert found.startswith(f"--{name} other"), name
    (found,) = logfile.Run(Path(), settings={"batch_seqs": "16"}).against_benchmark
    assert "1048576 tokens, not 524288" in found


REMEDY = "./run.sh tools/bundle.py SCRIPT.py OUT.py --record 2025-01-26_BatchSize"


@pytest.mark.parametrize(
    ("files", "folder", "message"),
    [
        (PAIR, "logs", "not an empty folder"),
        (PAIR | group("c", " --muon_lr 0.07"), NAME, "of 3 groups"),
        (group("b", FLAGS, files={"train_gpt.py": ""}), NAME, "other files, such as train_gpt.py."),
        ({"a/x.txt": ours(), "b/x.txt": ours()}, NAME, "two logs of this_pr are named x.txt"),
        (group("b", FLAGS), NAME, f"without the run's flags. Make one file with {REMEDY}{FLAGS},"),
        (group("b", source="    default_record = 'demo'"), NAME, f"{REMEDY}, and"),
        (group("c", TRACK3), NAME, "the benchmark's rule 4"),
    ],
)
def test_what_cannot_be_submitted_is_refused_in_a_line_and_nothing_is_written(
    submit, files, folder, message
):
    status, _, error = submit(files, folder=folder)
    assert status == 1 and files_here() == {*files}
    assert f"submission.py: error: {folder} was not made: " in error and message in error
