"""tools/submission.py: the folder of a pull request to the public project."""

import os
import re
import shlex
from pathlib import Path

import pytest
import submission
from scipy import stats
from test_leaderboard import FLAGS, GPUS, group, ours

import train_gpt

NAME = "2026-11-22_Trick"

# From the README of the public record 2026-01-18_UnifiedOptimizers: losses, times in milliseconds,
# and its table (runs, steps, time, loss, p); the steps are 4 here.
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


def pair(**more) -> dict[str, str]:
    """Return logs of a baseline and of a faster submission."""
    return group("a", **more) | group("b", FLAGS, ms=90.0, **more)


def paths() -> set[str]:
    """Return the paths of all that is here."""
    return {str(path) for path in Path(".").rglob("*")}


@pytest.fixture
def submit(tmp_path, monkeypatch, capsys):
    """Return call(files, *flags), which writes the logs, makes the folder, and returns the status
    (a text is an error), README.md or "", and the console's lines."""
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


def test_the_folder_holds_logs_of_both_groups_readme_and_diff(submit):
    files = pair()
    status, readme, _ = submit(files)
    logs = [f"baseline/a{i}.txt" for i in range(3)] + [f"this_pr/b{i}.txt" for i in range(3)]
    folder = {f"{NAME}/{path}" for path in [*logs, "baseline", "this_pr"]}
    folder |= {f"{NAME}/README.md", f"{NAME}/changes.diff"}
    assert readme.startswith("# Trick\n")
    assert status == 0 and paths() == {NAME, "logs", *files, *folder}
    for copy, text in zip(logs, files.values(), strict=True):
        assert Path(NAME, copy).read_text() == text


def test_without_a_baseline_the_logs_lie_beside_the_readme_and_the_lack_is_named(submit):
    status, readme, out = submit(group("b", FLAGS))
    assert status == 0
    assert {*os.listdir(NAME)} == {"README.md", "b0.txt", "b1.txt", "b2.txt"}
    assert "- No baseline: rule 4 needs" in readme and "- No baseline: rule 4 needs" in out


def test_figures_are_those_of_a_public_readme(submit):
    files = {
        f"logs/{name}{i}.txt": ours(loss, ms / 4, flags=f"{flags} --seed {i}")
        for (name, (losses, times, _)), flags in zip(PUBLISHED.items(), ("", FLAGS), strict=True)
        for i, (loss, ms) in enumerate(zip(losses, times, strict=True))
    }
    _, readme, _ = submit(files)
    for name, (losses, _, published) in PUBLISHED.items():
        *cells, p = row(readme, name)
        assert [*cells, f"{float(p):.4f}"] == published.split()
        by_scipy = stats.ttest_1samp(losses, 3.28, alternative="less").pvalue
        assert float(p) == pytest.approx(by_scipy, rel=0.01)
    assert "Rule 2 is met: the mean loss is at most 3.28 with p = 5.96e-03 < 0.01." in readme
    assert "this_pr is 1.0 % ± 0.1 % faster than baseline; its loss is 0.0001 " in readme


def test_rule_2_is_not_met_by_a_high_p_or_a_single_run():
    assert "Adding runs until p is low proves nothing" in submission.verdict((3.279, 3.2800))
    assert "one run, or runs with equal losses, have no p" in submission.verdict((3.279,))


def with_date(text: str, second: int) -> str:
    """Return the log with nvidia-smi's first line, at this second."""
    return text.replace(GPUS, f"Thu Jan  1 01:10:{second:02d} 2026       \n{GPUS}")


def listed_runs(readme: str) -> list[str]:
    """Return the names of the logs in the table of runs."""
    return re.findall(r"^\| \d+ \|[^|]*\| (\S+)\.txt \|", readme, re.M)


def test_runs_are_listed_by_the_dates_in_their_logs(submit):
    files = pair()
    begin = dict(zip(files, (0, 20, 40, 10, 30, 50), strict=True))
    files = {name: with_date(text, begin[name]) for name, text in files.items()}
    _, readme, out = submit(files)
    assert listed_runs(readme) == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert "Not in turn" not in readme + out
    files = {name: with_date(text, i) for i, (name, text) in enumerate(pair().items())}
    _, readme, out = submit(files, folder="2026-11-23_Trick")
    assert listed_runs(readme) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert "- Not in turn: " in readme and "- Not in turn: " in out


def test_the_diff_leads_from_the_baseline_to_the_submission(submit):
    """Settings are comments before it."""
    new = "import torch\nx = 1"
    readme = submit(group("a") | {"logs/b.txt": ours(3.27, 90.0, new, f"{FLAGS} --seed 7")})[1]
    lines = Path(NAME, "changes.diff").read_text().splitlines()
    assert lines[:3] == ["# muon_lr: 0.05 -> 0.06", "--- baseline", "+++ this_pr"]
    assert lines[4:] == [" import torch", "+x = 1"]
    assert "Lines of source: 1 added, 0 removed (`changes.diff`)." in readme
    assert "| muon_lr | `0.05` | `0.06` |" in readme and "| seed | `" not in readme


def test_the_commands_of_the_readme_make_the_runs_again(submit):
    """The shell must not expand the pattern."""
    flags = " --train_files data/kjv_train_*.bin --adam_betas 0.9 0.99 --val_files "
    _, readme, _ = submit(group("a") | group("b", flags, ms=90.0))
    loops = re.findall(r"^for seed in (.+); do \./run\.sh (.+) --seed \$seed; done$", readme, re.M)
    assert [seeds for seeds, _ in loops] == ["0 1 2", "0 1 2"]
    commands = [shlex.split(words) for _, words in loops]
    assert [script for script, *_ in commands] == ["baseline.py", "this_pr.py"]
    hp = [train_gpt.parse_args(flags, train_gpt.Run)[0] for _, *flags in commands]
    assert [h.adam_betas for h in hp] == [(0.8, 0.95), (0.9, 0.99)] and hp[1].val_files == ""
    assert hp[1].train_files == "data/kjv_train_*.bin" and "'data/kjv_train_*.bin'" in readme


@pytest.mark.parametrize(
    ("files", "note"),
    [
        (pair(), None),
        (group("a") | group("b", " --val_files data/kjv_val_*.bin", ms=90.0), "Not FineWeb: the p"),
        (group("a") | group("b", FLAGS, ms=110.0), "Not faster: by rule 4, this_pr must"),
        (group("a") | group("b", FLAGS, ms=90.0, gpu="1 x H100"), "Hardware differs: "),
        (group("a") | group("b", FLAGS, ms=90.0, torch="2.11.0"), "PyTorch differs: "),
        (pair() | {"logs/c.txt": ours(3.27, 90.0, flags=FLAGS)}, "this_pr has a seed twice: "),
    ],
)
def test_what_may_keep_a_submission_out_is_noted_in_readme_and_on_the_console(submit, files, note):
    """All runs took turns."""
    begin = sorted(files, key=lambda name: name[-5])
    files = {name: with_date(text, begin.index(name)) for name, text in files.items()}
    status, readme, out = submit(files)
    notes = readme.partition("## Notes")[2].partition("##")[0].strip().splitlines()
    assert status == 0 and len(notes) == (1 if note else 0)
    assert note is None or (notes[0].startswith(f"- {note}") and notes[0] in out)


def test_a_source_that_cannot_run_alone_is_refused(submit):
    status = submit(group("b", source="import train_gpt", files={"train_gpt.py": ""}))[0]
    assert "begins with a source that cannot run alone: it imports train_gpt.py" in status
    assert "./run.sh tools/bundle.py SCRIPT.py OUT.py" in status and not Path(NAME).exists()


CUT = ours().split("step:4/4")[0]


@pytest.mark.parametrize(
    ("files", "folder", "message"),
    [
        (pair(), "logs", "it exists and is not an empty folder: name another one"),
        (pair() | {"logs/c.txt": CUT}, NAME, "repeat the runs named above, or leave out"),
        (pair() | group("c", " --muon_lr 0.07"), NAME, "the logs are of 3 groups, listed above: "),
        (pair() | {"more/b1.txt": ours(flags=FLAGS)}, NAME, "two logs of this_pr are named b1.txt"),
    ],
)
def test_what_cannot_be_submitted_is_refused_in_a_line_and_nothing_is_written(
    submit, files, folder, message
):
    status, readme, out = submit(files, folder=folder)
    assert status.startswith(f"submission.py: {folder} was not made: ") and "\n" not in status
    assert message in status and readme == "" and "wrote" not in out
    assert paths() == {*files, *(str(Path(name).parent) for name in files)}


def test_a_submission_to_the_optimizer_benchmark_has_its_statistic_and_no_baseline(submit):
    losses = [3.2771, 3.2789, 3.2782, 3.2770]
    of_benchmark = " --context_len 1024"  # a setting that no other script has
    status, text, _ = submit(group("a", of_benchmark, losses))
    found = (3.28 - sum(losses) / 4) * 2
    verdict = f"Rule 3 is met: (3.28 - mean loss) * sqrt(runs) = {found:.5f}, 0.004 is needed."
    assert status == 0 and verdict in text and found > 0.004
    assert "rule 4" not in text
    assert "Rule 3 is not met" in submission.verdict([3.2779], benchmark=True)
    # Exactly the limit, which sums of decimals miss by a little.
    assert "Rule 3 is met" in submission.verdict([3.278] * 4, benchmark=True)
