"""forks/train_gpt_2026.py as a fork by import: what it leaves alone, and how it is started."""

import dataclasses
import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import train_gpt_2026
from conftest import language
from runs import console_of, error_of, run, val_losses
from train_gpt_2026 import RECORDS, Hyperparameters, Run

import train_gpt
from frontier.small_runs import A, D, checkpoint, main, small_flags
from train_gpt import HERE

SCRIPT = HERE / "forks/train_gpt_2026.py"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


# -----------------------------------------------------------------------------
# What an import does


def objects() -> dict[str, int]:
    """Return which object each name of train_gpt.py is, each name of its classes, each record."""
    found = {name: id(value) for name, value in vars(train_gpt).items()}
    for name, value in vars(train_gpt).items():
        if isinstance(value, type) and value.__module__ == "train_gpt":
            found |= {f"{name}.{own}": id(of) for own, of in vars(value).items()}
    return found | {f"record {name}": id(hp) for name, hp in train_gpt.RECORDS.items()}


def test_an_import_of_the_fork_changes_nothing_of_the_textbook(monkeypatch, capsys):
    """Neither its records nor its GPT nor its tables; and it prints nothing."""
    before, settings = objects(), repr(train_gpt.RECORDS)
    spec = importlib.util.spec_from_file_location("again", SCRIPT)
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "again", again)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(again)
    assert again.t is train_gpt and again.Run.records is not train_gpt.Run.records
    assert objects() == before and repr(train_gpt.RECORDS) == settings
    assert list(train_gpt.RECORDS) == list(train_gpt.Run.records)
    assert not set(RECORDS) & set(train_gpt.RECORDS) - {"demo"}
    assert capsys.readouterr() == ("", "")


def test_the_default_is_the_textbooks_default():
    """In all settings that the textbook has. Rows of layers name their skip connections here."""
    default, textbooks = vars(Hyperparameters()), vars(train_gpt.Hyperparameters())
    assert {name for name in textbooks if default[name] != textbooks[name]} == {"layers"}
    assert textbooks == vars(train_gpt.RECORDS["2025-01-26_BatchSize"])
    layers = train_gpt_2026.layer_table(Hyperparameters())
    theirs = train_gpt.layer_table(train_gpt.Hyperparameters())
    assert [(row.window, row.values) for row in layers] == [(r.window, r.values) for r in theirs]
    assert [row.skip_from for row in layers] == [None] * 6 + [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_made_of_the_forks_settings_and_can_be(name):
    hp = RECORDS[name]
    assert type(hp) is Hyperparameters
    Run.check(hp)
    parsed, args = train_gpt.parse_args(["--record", name, "--device", "cpu"], Run)
    assert parsed == replace(hp, device="cpu") and args.record == name
    hash(Run.moment(0, hp).kind)


def test_without_a_record_a_gpu_has_the_newest_and_a_cpu_the_demo(monkeypatch):
    for gpu, name in ((True, "2026-03-06_SimplifyHC"), (False, "demo")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        hp, args = train_gpt.parse_args([], Run)
        assert args.record == name and hp == RECORDS[name]


def test_the_demo_is_2026_03_06_made_small():
    """Nothing is switched off, and its stages and Adam's groups are those of the record."""
    demo, record = RECORDS["demo"], RECORDS["2026-03-06_SimplifyHC"]
    settings = vars(demo).items()
    switches = {name for name, value in settings if value != getattr(record, name)}
    switches = {name for name in switches if isinstance(getattr(demo, name), bool)}
    assert switches == {"bfloat16_head"}
    assert demo.bigram_rows > 0 and 0 < demo.tied_frac < 1 and demo.adam_every == 2
    stages, of_record = (train_gpt_2026.stage_table(hp.stages) for hp in (demo, record))
    assert [stage.targets for stage in stages] == [stage.targets for stage in of_record]
    assert [stage.length for stage in stages] == [stage.length for stage in of_record]
    assert demo.adam_groups.count(",") == record.adam_groups.count(",")


def test_windows_and_sequences_of_the_demo_grow():
    hp = RECORDS["demo"]
    moments = [train_gpt_2026.moment(step, hp) for step in range(hp.num_iterations + 1)]
    windows, lengths = [now.window for now in moments], [now.seq_len for now in moments]
    assert windows == sorted(windows) and windows[0] < windows[-2] < windows[-1] == hp.last_window
    stages = train_gpt_2026.stage_table(hp.stages)
    assert lengths == sorted(lengths)
    assert set(lengths) == {hp.seq_len * stage.length for stage in stages}


# -----------------------------------------------------------------------------
# The command line, and what a run writes


def test_help_names_every_setting_and_record(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: train_gpt_2026.py [--record NAME]")
    for f in dataclasses.fields(Hyperparameters):
        assert f"--{f.name} " in text and f.metadata["help"].split(",")[0] in text
    assert ", ".join(RECORDS) in text


def test_under_torchrun_in_another_folder_two_ranks_equal_one(tmp_path):
    """The script, by its path."""
    flags = [*small_flags(tmp_path)[D], "--save_every", "0"]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    alone = val_losses(console_of(flags, tmp_path / "one", main))
    done = run(flags, ranks=2, script=str(SCRIPT), cwd=tmp_path / "two")
    assert done.returncode == 0, done.stderr
    together = val_losses(done.stdout)
    assert list(together) == [0, 2, 4, 6, 8]
    assert together == pytest.approx(alone, abs=1e-4)


def test_the_log_begins_with_the_fork_and_has_what_it_imports_in_named_parts(tmp_path):
    console_of([*small_flags(tmp_path)[A], "--num_iterations", "1"], tmp_path, main)
    parts = (tmp_path / "logs/it.txt").read_text().split(f"\n{'=' * 100}\n")
    assert parts[0] == SCRIPT.read_text()
    assert parts[0].endswith("t.main(run_class=Run)\n")
    assert parts[4] == "train_gpt.py:\n" + (HERE / "train_gpt.py").read_text()
    assert parts[5] == "kernels.py:\n" + (HERE / "kernels.py").read_text()
    assert "\nattention_gate: on\n" in parts[3]
    assert re.search(r"^step:1/1 val_loss", parts[6], re.M)


# -----------------------------------------------------------------------------
# Checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """Save two steps of the textbook's demo, of the frontier's, and of a record."""
    found = {}
    folder = tmp_path_factory.mktemp("saved")
    short = [
        "--num_iterations",
        "2",
        "--save_every",
        "2",
        "--run_id",
        "it",
        "--val_loss_every",
        "0",
    ]
    demo = "--record demo --num_heads 2 --head_dim 8 --model_dim 16 --device cpu --val_tokens 1024"
    runs = {
        "textbook's demo": (train_gpt.main, language(folder)),
        "demo": (main, [*demo.split(), "--bigram_rows", "9"]),
        "record": (main, small_flags(folder)[A]),
    }
    for name, (of_script, words) in runs.items():
        own = folder / name.replace(" ", "_")
        own.mkdir()
        console_of([*words, *short], own, of_script)
        found[name] = own / checkpoint(2)
    return found


def test_a_checkpoint_names_its_script_and_has_its_source(saved):
    state = torch.load(saved["demo"], weights_only=True)
    assert state["script"] == "train_gpt_2026.py" and state["record"] == "demo"
    assert state["code"] == SCRIPT.read_text()
    assert {"stages", "bigram_rows"} < state["hyperparameters"].keys()
    assert "device" not in state["hyperparameters"]


@pytest.mark.parametrize("name", ["demo", "record"])
@pytest.mark.parametrize("flag", ["--eval", "--resume"])
def test_the_textbook_refuses_it_and_names_the_script(flag, name, saved, capsys):
    status, err = error_of([flag, saved[name], "--device", "cpu"], capsys)
    record = A if name == "record" else "demo"
    expected = f"{saved[name]} is of {record} of train_gpt_2026.py: start that script"
    assert status == 2 and err.startswith(f"train_gpt.py: error: {expected}")


@pytest.mark.parametrize("flag", ["--eval", "--resume"])
def test_the_frontier_refuses_the_textbooks_and_names_the_script(flag, saved, capsys):
    """Although both have a demo, and the textbook's settings are all known here."""
    path = saved["textbook's demo"]
    status, err = error_of([flag, path, "--device", "cpu"], capsys, main)
    expected = f"{path} is of demo of train_gpt.py: start that script"
    assert status == 2 and err.startswith(f"train_gpt_2026.py: error: {expected}")


def test_the_newest_checkpoint_of_the_script_is_found_among_those_of_both(saved, tmp_path, capsys):
    for name in ("demo", "textbook's demo"):  # the textbook's is newer
        folder = tmp_path / "logs" / name.replace(" ", "_")
        folder.mkdir(parents=True)
        (folder / saved[name].name).write_bytes(saved[name].read_bytes())
    main(["--eval", "auto", "--device", "cpu"])
    out = capsys.readouterr().out
    assert "over 1024 tokens, logs/demo/state_step000002.pt" in out
    assert "trying the one before" not in out  # the textbook's is no damaged one
