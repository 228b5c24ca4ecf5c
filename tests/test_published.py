"""tools/records.py: records side by side, and runs beside what is published of their records."""

import re

import pytest

import records
from train_gpt import HERE

RULE = "=" * 100
ONE_H100, H100S = "1 x NVIDIA H100 80GB HBM3", "8 x NVIDIA H100 80GB HBM3"


@pytest.fixture
def printed(capsys):
    """Return printed(words): it calls the tool, and returns status, lines and error."""

    def call(*words) -> tuple[int, list[str], str]:
        with pytest.raises(SystemExit) as end:
            records.main([str(word) for word in words])
            raise SystemExit(0)
        out, err = capsys.readouterr()
        return end.value.code, out.splitlines(), err

    return call


@pytest.mark.parametrize(
    "script",
    ["train_gpt.py", *(f"forks/train_gpt_{name}.py" for name in ("2026", "2026_07", "2026_08"))],
)
def test_without_a_flag_a_record_is_a_line_as_the_table_in_readme_has_it(script, printed):
    _, lines, _ = printed(script)
    table = (HERE / "README.md").read_text().split(f"`--record` of `{script}`")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    for line, (name, recipe, *result) in zip(lines[1:], rows, strict=True):
        found, steps, minutes, loss = re.split("  +", line)
        assert found == name.split("`")[1] and steps in re.findall(r"(\d+) steps", recipe)
        time, _, wanted = result[0].partition(" min; ") if found != "demo" else ("-", "", "-")
        assert loss == wanted and minutes.ljust(5, "0") == time.ljust(5, "0")


def test_diff_prints_what_two_records_differ_in_and_nothing_else(printed):
    _, lines, _ = printed("--diff", "2024-11-24_WindowWarmup", "2024-11-19_FlexAttention")
    assert [re.split("  +", line) for line in lines[1:]] == [
        ["num_iterations", "1750", "1875"],
        ["cooldown_frac", str(640 / 1750), str(562 / 1875)],
        ["window_min", "64", "1024"],
        ["window_span", "1728", "0"],
        ["adam_betas", "0.8 0.95", "0.9 0.95"],
        ["muon_lr", "0.05", "0.04"],
        ["momentum_warmup_steps", "300", "500"],
    ]
    _, lines, _ = printed("forks/train_gpt_2026.py", "--diff", "2025-08", "2026-03")
    assert ["momentum_cooldown_steps", "0", "50"] in [re.split("  +", line) for line in lines]


def test_diff_finds_records_of_two_scripts(printed):
    """A setting that one script lacks is -."""
    _, lines, _ = printed("--diff", "2026-07", "2026-08")
    rows = [re.split("  +", line) for line in lines]
    assert rows[0] == ["setting", "2026-07-17_FP8DownProjection", "2026-08-30_ANVIL2"]
    expected = (
        ["muon_decay", "1.2", "2.25"],
        ["optimizer", "-", "anvil"],
        ["ngram_rows", "-", "84602880"],
    )
    assert all(row in rows for row in expected) and not any(row[0] == "seed" for row in rows)


def write_log(path, record: str, curve: dict, place: str = H100S, data: str = "fineweb"):
    """Write the log of a run of 1600 steps; `curve` has losses and seconds by step."""
    results = [f"record {record} --muon_lr 0.1", f"on {place}, log in logs/it.txt"]
    for step, (loss, seconds) in curve.items():
        times = f"train_time:{1000 * seconds:.0f}ms step_avg:100.00ms"
        results.append(f"step:{step}/1600 val_loss:{loss:.4f} {times}")
    files = f"train_files: {data}_train_*.bin\nval_files: {data}_val_*.bin"
    path.write_text(f"\n{RULE}\n".join(["source", "torch 2.11.0", files, "\n".join(results)]))
    return path


@pytest.mark.parametrize("over", [True, False])
@pytest.mark.parametrize("place", [ONE_H100, H100S])
def test_losses_are_beside_the_published_ones_of_their_steps(place, over, printed, tmp_path):
    curve = {0: (10.83, 0), 250: (4.5807, 62.0), 260: (4, 70)} | (
        {1600: (3.28, 754)} if over else {}
    )
    rows = [["250", "4.5807", "4.5851", "-0.0044"], ["1600", "3.2800", "3.2777", "+0.0023"]]
    if place == ONE_H100:  # only there, a published run on one H100 and times tell something
        rows[0] += ["4.5707", "62.0", "63.6", "-1.6"]
        rows[1] += ["3.2784", "754.0", "754.4", "-0.4"]
    log = write_log(tmp_path / "it.txt", "2026-01-19_BigramHashEmbedding", curve, place)
    _, lines, _ = printed(log)
    assert [line.split() for line in lines[3 : 4 + over]] == rows[: 1 + over]
    spread = "3.2800 is outside the published spread, 3.2777 +- 2 x 0.0011"
    assert lines[4 + over :] == [spread] * over + ["other than the record: --muon_lr 0.1"]


def test_what_cannot_be_compared_is_said_in_one_line(printed, tmp_path):
    other = write_log(tmp_path / "it.txt", "2025-01-26_BatchSize", {0: (10.8, 0)}, data="mine")
    cases = {
        "nothing is published": [other],
        "--record 1999: must be one of": ["--diff", "demo", "1999"],
        f"Is a directory: '{tmp_path}'": [tmp_path],
        "No such file or directory: 'no_such.txt'": ["no_such.txt"],
    }
    for reason, words in cases.items():
        status, lines, err = printed(*words)
        assert (status, lines, err.count("\n")) == (1, [], 1) and reason in err
