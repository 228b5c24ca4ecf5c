"""tools/submission.py: the folder of a pull request to the public project."""

import json
import math
import os
import re
import shlex
import shutil
from pathlib import Path

import leaderboard
import numpy as np
import pytest
import submission
from test_leaderboard import GPUS, of_2025, ours

import train_gpt

NAME = "2026-11-22_Trick"
FLAGS = " --muon_lr 0.06"

# Of the README of the public record 2026-01-18_UnifiedOptimizers: losses, times in milliseconds,
# and its table (runs, time, loss, p), but for the steps, which here are 4.
PUBLISHED = {
    "baseline": (
        [3.2777, 3.2785, 3.2790, 3.2785, 3.2788, 3.2791, 3.2766, 3.2784],
        [105369, 105595, 105414, 105552, 105561, 105582, 105609, 105607],
        "8 4 105.5361 0.0923 +0.0000 3.2783 0.0008 +0.0000 0.0003",
    ),
    "this_pr": (
        [3.2781, 3.2803, 3.2767, 3.2799, 3.2794, 3.2767, 3.2767, 3.2780],
        [104649, 104442, 104243, 104454, 104486, 104322, 104655, 104412],
        "8 4 104.4579 0.1430 -1.0782 3.2782 0.0015 -0.0001 0.0060",
    ),
}


def group(letter: str, flags="", losses=(3.271, 3.272, 3.273), ms=100.0, **more) -> dict[str, str]:
    """Return logs of runs with seeds 0, 1, ... by name; the times differ by 4 ms."""
    runs = enumerate(losses)
    return {
        f"logs/{letter}{i}.txt": ours(loss, ms + i, flags=f"{flags} --seed {i}", **more)
        for i, loss in runs
    }


def pair(**more) -> dict[str, str]:
    """Return logs of a baseline and of a faster submission."""
    return group("a", **more) | group("b", FLAGS, ms=90.0, **more)


def paths() -> set[str]:
    """Return the paths of all that is here."""
    return {str(path) for path in Path(".").rglob("*")}


@pytest.fixture
def submit(tmp_path, monkeypatch, capsys):
    """Return call(files, *flags), which writes the logs, makes the folder of all of them, and
    returns status (text is an error's), README.md or "", and the console's lines."""
    monkeypatch.chdir(tmp_path)

    def call(files: dict[str, str], *flags, folder=NAME) -> tuple[int | str, str, str]:
        for name, text in files.items():
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text(text)
        status = 0
        try:
            submission.main([folder, *files, *flags])
        except SystemExit as stop:
            status = stop.code
        readme = Path(folder, "README.md")
        text = readme.read_text("utf-8") if readme.exists() else ""
        return status, text, capsys.readouterr().out

    return call


def row(readme: str, name: str) -> list[str]:
    """Return the cells of a group in the table of statistics."""
    return next(line.split()[1:] for line in readme.splitlines() if line.startswith(f"{name} "))


def p_by_hand(mean: float, sd: float, n: int) -> float:
    """Return the tail of Student's distribution beyond t, by integration; x = tan(a) makes it
    finite."""
    t = (mean - 3.28) / (sd / math.sqrt(n))
    angles = np.linspace(-math.pi / 2, math.atan(t), 100001)[1:]
    x = np.tan(angles)
    scale = math.gamma(n / 2) / math.sqrt((n - 1) * math.pi) / math.gamma((n - 1) / 2)
    return np.trapezoid(scale * (1 + x**2 / (n - 1)) ** (-n / 2) * (1 + x**2), angles)


def test_the_folder_holds_logs_of_both_groups_readme_and_diff(submit):
    files = pair()
    status, _, out = submit(files)
    logs = [f"baseline/a{i}.txt" for i in range(3)] + [f"this_pr/b{i}.txt" for i in range(3)]
    folder = {f"{NAME}/{path}" for path in [*logs, "baseline", "this_pr"]}
    folder |= {f"{NAME}/README.md", f"{NAME}/changes.diff"}
    assert status == 0 and paths() == {NAME, "logs", *files, *folder}
    for copy, text in zip(logs, files.values(), strict=True):
        assert Path(NAME, copy).read_text() == text
    assert "logs of 3 x baseline, 3 x this_pr" in out and 'under "What changed", say what' in out


def test_an_empty_folder_is_used_and_its_logs_give_the_same_folder_again(submit):
    Path(NAME).mkdir()
    first = submit(pair())[1]
    logs = {str(path): path.read_text() for path in sorted(Path(NAME).glob("*/*.txt"))}
    assert first and submit(logs, folder="2026-11-23_Trick")[1] == first


def test_a_single_run_is_enough_for_a_folder(submit):
    status, readme, _ = submit(group("b", FLAGS, losses=(3.27,)))
    assert status == 0 and "one run, or runs of equal losses, have no p" in readme


def test_without_a_baseline_the_logs_lie_beside_the_readme_and_the_lack_is_named(submit):
    status, readme, out = submit(group("b", FLAGS))
    assert status == 0
    assert {*os.listdir(NAME)} == {"README.md", "b0.txt", "b1.txt", "b2.txt"}
    for text in (readme, out):
        assert "- No baseline: rule 4 wants" in text and "./run.sh --compare" in text
    assert "baseline " not in readme.split("```")[1] and "no diff was made" in readme


def test_figures_are_those_of_a_public_readme(submit):
    files = {
        f"logs/{name}{i}.txt": ours(loss, ms / 4, flags=f"{flags} --seed {i}")
        for (name, (losses, times, _)), flags in zip(PUBLISHED.items(), ("", FLAGS), strict=True)
        for i, (loss, ms) in enumerate(zip(losses, times, strict=True))
    }
    _, readme, _ = submit(files)
    for name, (losses, times, published) in PUBLISHED.items():
        *cells, p = row(readme, name)
        assert [*cells, f"{float(p):.4f}"] == published.split()
        by_hand = p_by_hand(np.mean(losses), np.std(losses, ddof=1), 8)
        assert float(p) == pytest.approx(by_hand, rel=0.01)
        listed = readme.split(f"\n{name}:\n")[1].splitlines()
        assert [json.loads(line.split(" = ")[1]) for line in listed[:2]] == [
            losses,
            [ms / 1000 for ms in times],
        ]
    assert "Rule 2 is met: the mean loss is at most 3.28 with p = 5.96e-03 < 0.01." in readme
    assert "this_pr is 1.0 % ± 0.1 % faster than baseline; its loss is 0.0001 " in readme


def test_a_sample_that_does_not_meet_rule_2_is_not_to_be_made_longer(submit):
    """In README.md and on the console."""
    losses = (3.2785, 3.2800, 3.2792, 3.2798)
    p = p_by_hand(np.mean(losses), np.std(losses, ddof=1), 4)
    files = group("a", losses=losses) | group("b", FLAGS, losses, ms=90.0)
    lack = f"Rule 2 is not met: p = {p:.3f} is not below 0.01. Runs that are added until p is low "
    for text in submit(files)[1:]:
        assert lack in text and "more runs" not in text


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ((3.279, 3.2800), "Runs that are added until p is low prove nothing: plan a number"),
        ((3.281, 3.2815), "is not below 0.01. The mean loss is above 3.28. The rule is waived"),
        ((3.279,), "one run, or runs of equal losses, have no p"),
        ((3.279, 3.279), "one run, or runs of equal losses, have no p"),
        ((3.2701, 3.2702), "Rule 2 is met: the mean loss is at most 3.28 with p = "),
    ],
)
def test_the_verdict_on_rule_2_is_one_of_four(losses, words):
    assert words in submission.verdict(losses)


def with_date(text: str, second: int) -> str:
    """Return the log with nvidia-smi's first line, so many seconds after ten past one."""
    return text.replace(GPUS, f"Thu Jan  1 01:10:{second:02d} 2026       \n{GPUS}")


def listed_runs(readme: str) -> list[str]:
    """Return the names of the logs in the table of runs."""
    return re.findall(r"^\| \d+ \|[^|]*\| (\S+)\.txt \|", readme, re.M)


def test_runs_are_listed_by_the_dates_in_their_logs(submit):
    """By nvidia-smi's date, whatever dates their source has; runs that took turns are not warned
    about."""
    files = pair(source="born = [\nThu Jan  1 01:00:00 2026\n]")
    begin = dict(zip(files, (0, 20, 40, 10, 30, 50), strict=True))
    files = {name: with_date(text, begin[name]) for name, text in files.items()}
    _, readme, out = submit(files)
    assert listed_runs(readme) == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert "by the dates in the logs. Runs of baseline and this_pr were in turn." in readme
    assert "Not in turn" not in readme + out
    files = {name: with_date(text, i) for i, (name, text) in enumerate(pair().items())}
    _, readme, out = submit(files, folder="2026-11-23_Trick")
    assert listed_runs(readme) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert "this_pr were not in turn." in readme and "- Not in turn: " in readme
    assert "- Not in turn: " in out


def test_dates_in_names_and_times_of_files_tell_the_order_of_other_logs(submit):
    """Runs of one --runs share a date, and their seeds count up, past 9 too."""
    date = "2026-11-22_02-00-0"
    files = {
        f"logs/{date}{second}_seed{seed}.txt": ours(3.27, ms, flags=f"{flags} --seed {seed}")
        for second, seed, flags, ms in ((3, 2, "", 100), (5, 10, FLAGS, 90), (5, 9, FLAGS, 90))
    }
    _, readme, _ = submit(files)
    assert listed_runs(readme) == [f"{date}{end}" for end in ("3_seed2", "5_seed9", "5_seed10")]
    assert "by the dates in the names of the logs." in readme
    files = group("a") | group("b", FLAGS, ms=90.0)
    for name, text in files.items():
        Path(name).write_text(text)
        os.utime(name, (0, 100 * int(name[-5]) + (name[-6] == "a")))
    runs = [leaderboard.read_log(Path(name)) for name in files]
    order, clock = submission.in_order(runs)
    assert [r.path.stem for r in order] == ["b0", "a0", "b1", "a1", "b2", "a2"]
    assert clock.startswith("times of the log files")


@pytest.mark.parametrize(
    ("order", "turns"),
    [
        ("ab", 1),
        ("abab", 1),
        ("abba", 1),
        ("aabb", 0),
        ("ababbb", 1),
        ("bbabab", 0),
        ("abaabb", 0),
        ("a", 0),
    ],
)
def test_runs_took_turns_where_each_two_in_a_row_are_one_of_each(order, turns):
    assert submission.in_turn([*order]) is bool(turns)


def test_the_diff_leads_from_the_baselines_source_to_the_submissions(submit):
    """In so short a source all lines are context; settings are comments before the diff."""
    old, new = "import torch\nx = 1\ny = 2", "import torch\n\ny = 2\nz = 3"
    other_seed = {"logs/b.txt": ours(3.27, 90.0, new, f"{FLAGS} --seed 7 --val_loss_every 4")}
    _, readme, _ = submit(group("a", source=old) | other_seed)
    lines = Path(NAME, "changes.diff").read_text().splitlines()
    assert lines[:3] == ["# muon_lr: 0.05 -> 0.06", "--- baseline", "+++ this_pr"]
    for source, signs in ((old, " -"), (new, " +")):
        assert [line[1:] for line in lines[4:] if line[0] in signs] == source.splitlines()
    assert "Lines of source: 2 added, 1 removed (`changes.diff`)." in readme
    assert "| muon_lr | `0.05` | `0.06` |" in readme and "| seed | `" not in readme


def test_a_difference_in_flags_or_machine_alone_has_no_lines_of_source(submit):
    files = group("a", kernels="none, on a CPU") | group("b", ms=90.0, kernels="relu2 xxt")
    _, readme, _ = submit(files)
    diff = Path(NAME, "changes.diff").read_text()
    assert diff == "# kernels: none -> relu2 xxt\n# the sources are equal\n"
    assert "The source is the same" in readme and "| kernels | `none` | `relu2 xxt` |" in readme


def test_the_commands_of_the_readme_make_the_runs_again(submit):
    """train_gpt.py, in a file of the group's name, reads them; the shell must not expand the
    pattern."""
    flags = " --train_files data/kjv_train_*.bin --adam_betas 0.9 0.99 --val_files "
    _, readme, _ = submit(group("a") | group("b", flags, ms=90.0))
    loops = re.findall(r"^for seed in (.+); do \./run\.sh (.+) --seed \$seed; done$", readme, re.M)
    assert [seeds for seeds, _ in loops] == ["0 1 2", "0 1 2"]
    (a, *a_flags), (b, *b_flags) = (shlex.split(words) for _, words in loops)
    assert (a, b) == ("baseline.py", "this_pr.py")
    assert "# baseline: baseline.py is the source at the head of its logs" in readme
    hp = [train_gpt.parse_args(words, train_gpt.Run)[0] for words in (a_flags, b_flags)]
    assert [h.adam_betas for h in hp] == [(0.8, 0.95), (0.9, 0.99)] and hp[1].val_files == ""
    assert hp[1].train_files == "data/kjv_train_*.bin" and "'data/kjv_train_*.bin'" in readme


def test_public_logs_are_taken_and_have_no_commands(submit):
    files = {"logs/a.txt": of_2025(3.27), "logs/b.txt": of_2025(3.26).replace("os", "sys", 1)}
    status, readme, _ = submit(files)
    assert status == 0 and "The logs hold no settings apart from the source." in readme
    assert "for seed" not in readme and "| 1 | baseline | a.txt | - | 3.2700 |" in readme
    assert "# the logs hold no settings" in Path(NAME, "changes.diff").read_text()


@pytest.mark.parametrize(
    ("files", "note"),
    [
        (pair(), None),
        (group("a") | group("b", " --val_files data/kjv_val_*.bin", ms=90.0), "Not FineWeb: the p"),
        (group("a") | group("b", FLAGS, ms=110.0), "Not faster: rule 4 wants this_pr to take less"),
        (group("a") | group("b", FLAGS, ms=90.0, gpu="1 x H100"), "Hardware differs: rule 4 wants"),
        (group("a") | group("b", FLAGS, ms=90.0, torch="2.11.0"), "PyTorch differs: "),
        (pair() | {"logs/c.txt": ours(3.27, 90.0, flags=FLAGS)}, "this_pr has a seed twice: those"),
    ],
)
def test_what_may_keep_a_submission_out_is_noted_in_readme_and_on_the_console(submit, files, note):
    """The files are written in turn, so the order of the logs is no matter here."""
    begin = sorted(files, key=lambda name: name[-5])
    files = {name: with_date(text, begin.index(name)) for name, text in files.items()}
    status, readme, out = submit(files)
    notes = readme.partition("## Notes")[2].partition("##")[0].strip().splitlines()
    assert status == 0 and len(notes) == (1 if note else 0)
    assert note is None or (notes[0].startswith(f"- {note}") and notes[0] in out)


def test_a_name_without_a_date_is_noted_and_a_date_is_no_part_of_the_title(submit):
    _, readme, out = submit(pair(), folder="Trick")
    assert readme.startswith("# Trick\n") and "not of the public form YYYY-MM-DD_Name" in out
    _, readme, out = submit(pair())
    assert readme.startswith("# Trick\n") and "YYYY-MM-DD_Name" not in readme + out


def test_the_diff_has_all_files(submit):
    files = group("a", files={"kernels.py": "x = 1\n--y"})
    files |= group("b", ms=90.0, files={"kernels.py": "x = 1\n++z\ny = 2"})
    _, readme, _ = submit(files)
    lines = Path(NAME, "changes.diff").read_text().splitlines()
    assert lines[:2] == ["--- baseline/kernels.py", "+++ this_pr/kernels.py"]
    assert lines[4:] == ["---y", "+++z", "+y = 2"]
    assert "Lines of source: 2 added, 1 removed (`changes.diff`)." in readme


TEXTBOOK = "try:\n    from kernels import TWINS\nexcept ImportError:\n    TWINS = {}"
FORK = "import torch\nimport train_gpt as t"
TWINS = {"kernels.py": "import triton"}
USED = "relu2_mlp symmetric_matmul"


@pytest.mark.parametrize(
    ("source", "files", "kernels", "missing"),
    [
        (TEXTBOOK, TWINS, "none, on a CPU", None),
        (TEXTBOOK, TWINS, USED, "kernels.py"),
        (TEXTBOOK, {}, USED, None),  # a script that brings its kernels with it
        (FORK, TWINS | {"train_gpt.py": TEXTBOOK}, "none", "train_gpt.py"),
        (f"{FORK}\nfrom kernels import x", TWINS | {"train_gpt.py": ""}, USED, "kernels.py and tr"),
        ("import torch", {"train_gpt.py": ""}, "none", None),
        ("import (", TWINS, "none", "whole source"),
    ],
)
def test_a_source_that_cannot_run_alone_is_refused(submit, source, files, kernels, missing):
    """By the log itself: what its first part imports, of which there are other parts."""
    options = {"source": source, "files": files, "kernels": kernels}
    status, readme, _ = submit(group("b", FLAGS, **options))
    if missing is None:
        assert status == 0 and readme
    elif missing == "whole source":
        assert "b0.txt does not begin with a whole source: " in status and "\n" not in status
    else:
        assert f"b0.txt begins with a source that cannot run alone: it imports {missing}" in status
        assert "./run.sh tools/bundle.py SCRIPT.py OUT.py" in status and "\n" not in status
    assert Path(NAME).exists() == (missing is None)


CUT = ours().split("step:4/4")[0]


@pytest.mark.parametrize(
    ("files", "folder", "message"),
    [
        (pair(), "logs", "it is there already and not an empty folder: name another one"),
        (pair(), "logs/a0.txt", "it is there already and not an empty folder: name another one"),
        (pair(), "none/x", "none: make it first"),
        (pair() | {"logs/c.txt": CUT}, NAME, "make the runs named above again, or leave out their"),
        (pair() | {"logs/c.txt": ""}, NAME, "make the runs named above again, or leave out their"),
        ({"logs/c.txt": ""}, NAME, "make the runs named above again, or leave out their logs"),
        (pair() | group("c", " --muon_lr 0.07"), NAME, "the logs are of 3 groups, listed above: "),
        (pair() | {"more/b1.txt": ours(flags=FLAGS)}, NAME, "two logs of this_pr have the name of"),
        ({"logs/a.txt": ours().split("CPU\n")[-1]}, NAME, "a.txt has no source: public logs"),
    ],
)
def test_what_cannot_be_submitted_is_refused_in_a_line_and_nothing_is_written(
    submit, files, folder, message
):
    status, readme, out = submit(files, folder=folder)
    assert status.startswith(f"submission.py: {folder} was not made: ") and "\n" not in status
    assert message in status and readme == "" and "wrote" not in out
    assert paths() == {*files, *(str(Path(name).parent) for name in files)}


def test_bad_flags_are_refused(submit):
    """A folder without logs, and a target: the public rules have one."""
    assert submit({})[0] == 2 and submit(pair(), "--target", "3.3")[0] == 2 and NAME not in paths()


def test_the_comparison_of_few_runs_or_of_other_lengths_has_no_verdict(submit):
    """Of three runs; of four with two lengths; of four, whose mean losses are 0.001 apart."""
    assert "3 and 3 runs have no interval and no verdict" in submit(pair())[1]
    losses = (3.271, 3.272, 3.273, 3.274)
    base = group("a", losses=losses)
    longer = group("b", FLAGS, losses, ms=50.0, steps=6)
    readme = submit(base | longer, folder="2026-11-23_Trick")[1]
    assert "this_pr has 6 steps, baseline 4: their losses are not compared; this_pr is " in readme
    assert "settled" not in readme
    near = group("b", FLAGS, [x + 0.001 for x in losses], ms=90.0)
    readme = submit(base | near, folder="2026-11-24_Trick")[1]
    assert "0.0010 ± 0.0022 higher; that is not settled (p = 0.3" in readme


@pytest.mark.parametrize("stops", [OSError("No space left"), KeyboardInterrupt()])
def test_a_folder_that_cannot_be_finished_is_not_begun(submit, monkeypatch, stops):
    copied = []

    def full(*paths):
        if copied:
            raise stops
        copied.append(shutil.copyfile(*paths))

    files = pair()
    monkeypatch.setattr(shutil, "copy2", full)
    if isinstance(stops, OSError):
        assert submit(files)[0] == f"submission.py: {NAME} was not made: No space left"
    else:
        with pytest.raises(KeyboardInterrupt):
            submit(files)
    assert copied and paths() == {"logs", *files}


def test_a_submission_to_the_optimizer_benchmark_has_its_statistic_and_no_baseline(submit):
    """Nothing is said of times; a folder's name has the benchmark's form."""
    losses = [3.2771, 3.2789, 3.2782, 3.2770]
    logs = {
        f"logs/a{i}.txt": re.sub(r"(val_loss:\d+\.\d{4})", r"\g<1>0", text)
        for i, text in enumerate(group("a", losses=losses).values())
    }
    status, text, out = submit(logs)
    found = (3.28 - sum(losses) / 4) * 2
    assert status is None or status == 0
    verdict = f"Rule 3 is met: (3.28 - mean loss) * sqrt(runs) = {found:.5f}, wanted are 0.004."
    assert verdict in text and found > 0.004
    assert "is not of the public form YYYYMMDD_name" in text and "rule 4" not in text
    assert "Rule 3 is not met" in submission.verdict([3.2779], benchmark=True)
    # Exactly the limit, which sums of decimals miss by a little.
    assert "Rule 3 is met" in submission.verdict([3.278] * 4, benchmark=True)
