"""tools/submission.py: the folder of a pull request to the public project."""

from pathlib import Path

import pytest

import submission
from test_leaderboard import FLAGS, TRACK3, group, ours, rows_of

NAME = "2026-11-22_Trick"


def pair(flags=FLAGS, ms=90.0, **more) -> dict[str, str]:
    """Return logs of a baseline and of a submission."""
    return group("a") | group("b", flags, ms=ms, **more)


@pytest.fixture
def submit(tmp_path, monkeypatch, capsys):
    """Return call(files, *flags), which writes the logs, makes the folder, and returns the status,
    README.md or "", and the console's lines or the error."""
    monkeypatch.chdir(tmp_path)

    def call(files: dict[str, str], *flags, folder=NAME) -> tuple[int, str, str]:
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
        out, err = capsys.readouterr()
        return status, text, err or out

    return call


def paths() -> set[str]:
    """Return the paths of all files that are here."""
    return {str(path) for path in Path(".").rglob("*") if path.is_file()}


def test_the_folder_holds_the_logs_of_both_groups(submit):
    files = pair()
    status, readme, _ = submit(files)
    logs = [f"baseline/a{i}.txt" for i in range(3)] + [f"this_pr/b{i}.txt" for i in range(3)]
    assert status == 0 and paths() == {*files, *(f"{NAME}/{p}" for p in [*logs, "README.md"])}
    for copy, text in zip(logs, files.values(), strict=True):
        assert Path(NAME, copy).read_text() == text
    assert "`diff baseline/a0.txt this_pr/b0.txt`" in readme


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
    ("losses", "rule"),
    [
        ([3.279, 3.2800], "Rule 2 is not met: p = 0.250 is not below 0.01. Adding runs "),
        ([3.279], "Rule 2 is not met: one run"),
    ],
)
def test_a_rule_is_not_met(losses, rule, submit):
    status, readme, out = submit(group("a", losses=losses))
    assert status == 0 and rule in readme and rule in out


@pytest.mark.parametrize(
    ("files", "note"),
    [
        (pair(), None),
        (pair(" --val_files data/kjv_val_*.bin"), "Not FineWeb: the p"),
        (pair(ms=110.0), "Not faster: by rule 4, this_pr must"),
        (pair(gpu="1 x H100"), "GPU or PyTorch differs: "),
        (group("b", FLAGS), "No baseline: rule 4 needs"),
    ],
)
def test_what_may_keep_a_submission_out_is_noted_in_readme_and_on_the_console(submit, files, note):
    status, readme, out = submit(files)
    notes = readme.partition("## Notes")[2].partition("##")[0].strip().splitlines()
    assert status == 0 and len(notes) == (1 if note else 0)
    assert note is None or (notes[0].startswith(f"- {note}") and notes[0] in out)


@pytest.mark.parametrize(("losses", "met"), [((3.277, 3.2774), "met"), ((3.278,), "not met")])
def test_the_optimizer_benchmark_has_a_rule_of_its_own(losses, met, submit):
    """(3.28 - 3.2772) sqrt(2) = 0.00396 is not enough; time and baselines do not count."""
    losses = [loss - 0.0001 for loss in losses]
    _, readme, _ = submit(group("a", TRACK3, losses=losses))
    margin = (3.28 - sum(losses) / len(losses)) * len(losses) ** 0.5
    assert (margin >= 0.004) == (met == "met")
    assert f"The benchmark's rule is {met}: " in readme and f"= {margin:.5f}, and 0.004" in readme
    assert "## Notes" not in readme


CUT = ours().split("step:4/4")[0]
ALONE = "begins with a source that cannot run alone: it imports train_gpt.py"


@pytest.mark.parametrize(
    ("files", "folder", "message"),
    [
        (pair(), "logs", "it exists and is not an empty folder: name another one"),
        (pair() | {"logs/c.txt": CUT}, NAME, "repeat the runs named above, or leave out"),
        (pair() | group("c", " --muon_lr 0.07"), NAME, "the logs are of 3 groups, listed above: "),
        (pair() | {"more/b1.txt": ours(flags=FLAGS)}, NAME, "two logs of this_pr are named b1.txt"),
        (group("b", files={"train_gpt.py": ""}), NAME, ALONE),
    ],
)
def test_what_cannot_be_submitted_is_refused_in_a_line_and_nothing_is_written(
    submit, files, folder, message
):
    status, _, error = submit(files, folder=folder)
    assert status == 1 and paths() == {*files}
    assert f"submission.py: error: {folder} was not made: " in error and message in error
