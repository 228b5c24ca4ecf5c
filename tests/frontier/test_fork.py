"""forks/train_gpt_2026.py as a fork by import: what it leaves alone, and how it is started."""

import re
from dataclasses import replace

import pytest
import torch
import train_gpt_2026
from runs import run, val_losses
from train_gpt_2026 import RECORDS, Hyperparameters, Run

import train_gpt
from frontier.small_runs import LAST, A, D, checkpoint
from train_gpt import HERE, UserError, load_checkpoint

SCRIPT = HERE / "forks/train_gpt_2026.py"


def test_the_default_is_that_of_train_gpt():
    """In all settings that it has. Rows of layers name their skip connections here."""
    default, theirs = vars(Hyperparameters()), vars(train_gpt.Hyperparameters())
    assert {name for name in theirs if default[name] != theirs[name]} == {"layers"}
    assert theirs == vars(train_gpt.RECORDS["2025-01-26_BatchSize"])


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_made_of_the_forks_settings_and_can_be(name):
    hp = RECORDS[name]
    assert type(hp) is Hyperparameters
    Run.check(hp)
    found = train_gpt.parse_args(["--record", name, "--device", "cpu"], Run)
    assert found == (replace(hp, device="cpu"), name)
    hash(Run.moment(0, hp).graph_key)


def test_without_a_record_a_gpu_has_the_newest_and_a_cpu_the_demo(monkeypatch):
    for gpu, name in ((True, "2026-03-06_SimplifyHC"), (False, "demo")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert train_gpt.parse_args([], Run) == (RECORDS[name], name)


def test_the_demo_is_2026_03_06_made_small():
    """Nothing is switched off, its stages and Adam's groups are those of the record, and windows
    grow."""
    demo, record = RECORDS["demo"], RECORDS["2026-03-06_SimplifyHC"]
    settings = vars(demo).items()
    switches = {name for name, value in settings if value != getattr(record, name)}
    switches = {name for name in switches if isinstance(getattr(demo, name), bool)}
    assert not switches
    assert demo.bigram_rows > 0 and 0 < demo.tied_frac < 1 and demo.adam_every == 2
    stages, of_record = (train_gpt_2026.stage_table(hp.stages) for hp in (demo, record))
    assert [stage.targets for stage in stages] == [stage.targets for stage in of_record]
    assert [stage.length for stage in stages] == [stage.length for stage in of_record]
    assert demo.adam_groups.count(",") == record.adam_groups.count(",")
    windows = [Run.moment(step, demo).window for step in range(demo.num_iterations + 1)]
    assert windows == sorted(windows) and windows[0] < windows[-2] < windows[-1] == 512


def test_under_torchrun_two_ranks_equal_one(flags, whole, tmp_path):
    """The script, by its path, in another folder."""
    done = run([*flags[D], "--keep", "0"], ranks=2, script=str(SCRIPT), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert val_losses(done.stdout) == pytest.approx(whole(D).losses, abs=1e-4)


def test_the_log_begins_with_the_fork_and_has_what_it_imports_in_named_parts(whole):
    parts = (whole(A).folder / "logs/it.txt").read_text().split(f"\n{'=' * 100}\n")
    assert parts[0] == SCRIPT.read_text()
    assert "\nattention_gate: on\n" in parts[3]
    for name in ("train_gpt.py", "gpu_kernels.py"):
        assert f"{name}:\n{(HERE / name).read_text()}" in parts[4:-1]
    assert re.search(r"^step:8/8 val_loss", parts[-1], re.M)


def test_each_script_refuses_the_others_checkpoints_and_names_the_script(whole, trained):
    """The record of train_gpt.py's has the name of a record here, too."""
    own = whole(A).folder / checkpoint(LAST)
    with pytest.raises(UserError, match=f"{own} is a checkpoint of .* train_gpt_2026.py"):
        load_checkpoint(own, train_gpt.Run)
    with pytest.raises(UserError, match=f"{trained.path} is a checkpoint of .* train_gpt.py"):
        load_checkpoint(trained.path, Run)
