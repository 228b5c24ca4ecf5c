"""tools/records.py: records side by side, and runs beside what is published of their records."""

import re

import pytest
import records

import train_gpt
from train_gpt import HERE

FORK = "forks/train_gpt_2026.py"
RULE = "=" * 100
ONE_H100, H100S = "1 x NVIDIA H100 80GB HBM3", "8 x NVIDIA H100 80GB HBM3"


@pytest.fixture
def printed(capsys):
    """Return printed(words): it calls the tool, and returns status, lines and error."""

    def call(*words) -> tuple[int, list[str], str]:
        status = 0
        try:
            records.main([str(word) for word in words])
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        return status, out.splitlines(), err

    return call


# ---- Records below each other, and side by side


@pytest.mark.parametrize("script", ["train_gpt.py", FORK])
def test_without_a_flag_a_record_is_a_line_as_the_table_in_readme_has_it(script, printed):
    """But for 2025-01-26, whose time there is a second timing."""
    status, lines, err = printed(script)
    assert (status, err) == (0, "") and max(map(len, lines)) <= 100
    table = (HERE / "README.md").read_text().split(f"`--record` of `{script}`")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    for line, (name, recipe, *result) in zip(lines[1:], rows, strict=True):
        found, steps, minutes, loss = re.split("  +", line)
        assert found == name.split("`")[1] and steps in re.findall(r"(\d+) steps", recipe)
        if found == "demo":
            assert (minutes, loss) == ("-", "-")
            continue
        wanted_minutes, wanted_loss = re.fullmatch(r"([\d.]+) min; (.*)", result[0]).groups()
        assert float(minutes) == float(wanted_minutes.replace("2.997", "2.933"))
        assert loss.removesuffix(", 1 run") == wanted_loss


def table_of(lines: list[str]) -> dict[str, list[str]]:
    """Return the cells of lines by their titles."""
    rows = [re.split("  +", line) for line in lines]
    return {title: cells for title, *cells in rows}


def test_all_records_of_a_script_are_printed_with_every_setting(printed):
    status, lines, err = printed("--all")
    assert (status, err) == (0, "") and lines[0].split() == list(train_gpt.RECORDS)
    rows = table_of(lines[1:])
    assert rows["num_iterations"] == ["1875", "1750", "1770", "128"]
    assert rows["layer 11"] == ["long+vfirst", "long+vfirst", "long+v2", "long+v2"]


def test_diff_prints_what_two_records_differ_in_and_nothing_else(printed):
    words = "--diff", "2024-11-24_WindowWarmup", "2024-11-19_FlexAttention"
    status, lines, err = printed(*words)
    assert (status, err) == (0, "")
    assert table_of(lines[1:]) == {
        "num_iterations": ["1750", "1875"],
        "cooldown_frac": [str(640 / 1750), str(562 / 1875)],
        "window_min": ["64", "1024"],
        "window_span": ["1728", "0"],
        "adam_betas": ["0.8 0.95", "0.9 0.95"],
        "muon_lr": ["0.05", "0.04"],
        "momentum_warmup_steps": ["300", "500"],
        "published minutes": ["4.66", "5.03"],
    }


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--diff demo 2026-03", "--record 2026-03: must be one of 2024-11-19_FlexAttention, "),
        ("logs/no_such.txt", "No such file"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(words, reason, printed):
    status, lines, err = printed(*words.split())
    assert status == 1 and not lines
    assert reason in err and err.startswith("records.py: error: ") and err.count("\n") == 1


# ---- A run beside what is published


@pytest.fixture
def log(tmp_path):
    """Return write(...): it writes a log and returns its path. `curve` has losses and seconds by
    step; `flags` are those that the record lacks."""

    def write(record: str, curve: dict, flags: str = "", place: str = H100S):
        files = {"train_files": "data/fineweb_train_*.bin", "val_files": "data/fineweb_val_*.bin"}
        files |= dict(re.findall(r"--(\w+_files) (\S+)", flags))
        results = [f"record {record}{flags}", f"on {place}, log in logs/it.txt", "kernels: none"]
        for step, (loss, seconds) in curve.items():
            times = f"train_time:{1000 * seconds:.0f}ms step_avg:{seconds / max(step, 1):.2f}ms"
            results.append(f"step:{step}/{max(curve)} val_loss:{loss:.4f} {times}")
        parts = [
            "source",
            "Python 3.11\ntorch 2.11.0 CUDA 12.8",
            "\n".join(f"{name}: {value}" for name, value in files.items()),
            "\n".join(results),
        ]
        path = tmp_path / "it.txt"
        path.write_text(f"\n{RULE}\n".join(parts) + "\n")
        return path

    return write


def cells(lines: list[str]) -> list[list[str]]:
    """Return the cells of the table's rows."""
    return [line.split() for line in lines if re.match(r" *\d+ ", line) and " is " not in line]


def test_losses_are_beside_the_published_ones_of_their_steps(log, printed):
    """Of one run, whose deviations are not known; and what is not as in the record is named."""
    curve = {0: (10.8258, 0), 125: (4.4403, 20), 130: (4.4, 21), 250: (3.2873, 40)}
    path = log("2024-11-19_FlexAttention", curve, " --num_iterations 250 --seed 3 --compile off")
    status, lines, err = printed(path)
    assert (status, err) == (0, "")
    assert "published losses are those of one run on 8 H100s" in lines[0]
    assert cells(lines) == [
        ["0", "10.8258", "10.8258", "-", "+0.0000"],
        ["125", "4.4403", "4.4503", "-", "-0.0100"],
        ["250", "3.2873", "4.0085", "-", "-0.7212"],
    ]
    assert lines[-2] == "3.2873 is inside the published spread, 3.2783 +- 2 x 0.0050"
    assert lines[-1] == "other than the record's: num_iterations"


@pytest.mark.parametrize("place, compared", [(ONE_H100, True), (H100S, False)])
def test_only_a_run_on_one_gpu_is_compared_with_the_run_on_one_h100(place, compared, log, printed):
    curve = {0: (10.83, 0), 250: (4.5807, 62.0), 1600: (3.2784, 754.0)}
    _, lines, _ = printed(log("2026-01-19_BigramHashEmbedding", curve, place=place))
    among_eight = ["1600", "3.2784", "3.2777", "0.0011", "+0.0007"]
    on_one = ["3.2784", "754.0", "754.4", "-0.4"]
    assert cells(lines)[2] == (among_eight + on_one if compared else among_eight)


def test_a_run_that_is_not_over_is_compared_as_far_as_it_came(log, printed):
    path = log("2025-01-26_BatchSize", {0: (10.8, 0), 125: (4.5, 12), 1770: (3.28, 180)})
    path.write_text(path.read_text().split("step:1770")[0])
    _, lines, _ = printed(path)
    assert [row[0] for row in cells(lines)] == ["0", "125"] and "spread" not in lines[-1]


def test_runs_on_other_data_are_not_compared(log, printed):
    flags = " --val_files mine/val_*.bin"
    status, lines, err = printed(log("2025-01-26_BatchSize", {0: (10.8, 0), 1: (3.28, 1)}, flags))
    assert (status, lines) == (1, []) and err.count("\n") == 1
    assert "the run was not on FineWeb" in err
