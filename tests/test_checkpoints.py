"""Checkpoints: what they hold, and what is refused."""

import dataclasses
import gc
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

import train_gpt
import train_gpt_2026
from conftest import language
from runs import console_of, error_of, val_losses
from train_gpt import HERE, UserError, beginning, load_checkpoint, parse_args, show

OF_RUN = [f.name for f in dataclasses.fields(train_gpt.RunSettings)]
OF_DEMO = vars(train_gpt.RECORDS["demo"]).keys() - {"init_from"}  # which names a file
OF_FORK = vars(train_gpt_2026.Hyperparameters()).keys() - vars(train_gpt.Hyperparameters()).keys()
TEXTS = {
    "tokenizer": "none",
    "stages": "window=256,window=512",
    "adam_groups": "scalar+lr=0.02",
    "adam_rule": "torch",
}
SIZES = (
    "--model_dim 32 --num_heads 4 --head_dim 16 --seq_len 128 --val_seq_len 256 --val_tokens 512 "
    "--batch_seqs 2 --num_iterations 2 --epochs 0 --layers long+v0,short --num_layers 2 "
    "--vocab_size 4224 --end_of_text 4200 --compile off --device cpu --run_id it --keep 1"
)
FILES = ["--train_files", f"{HERE}/data/kjv_val_*.bin"]
FILES += ["--val_files", f"{HERE}/data/kjv_train_*.bin"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> SimpleNamespace:
    """Train for eight steps, of which two are saved. Return flags, losses and folder."""
    folder = tmp_path_factory.mktemp("run")
    flags = [*language(folder), "--num_iterations", "8", "--val_loss_every", "4"]
    flags += ["--model_dim", "32", "--num_heads", "1", "--batch_seqs", "2", "--val_tokens", "1024"]
    flags += ["--save_every", "2", "--keep", "2", "--run_id", "it"]
    losses = val_losses(console_of(flags, folder))
    return SimpleNamespace(flags=flags, losses=losses, folder=folder)


# ---- settings


def another(hp, name: str):
    """Return a value of a setting that differs from this one."""
    value = getattr(hp, name)
    choices = {f.name: get_args(f.type) for f in dataclasses.fields(hp)}[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return next(x for x in (*choices, TEXTS.get(name), "long,long") if x not in (value, None))
    if isinstance(value, tuple):
        return tuple(x / 3 for x in value)
    return value / 3 or 0.5 if isinstance(value, float) else value * 2 or 2


SCRIPTS = [
    (train_gpt.Run, "demo", OF_DEMO),
    (train_gpt_2026.Run, "2025-08-23_SparseAttnGate", OF_FORK),
]


@pytest.mark.parametrize(("run", "record", "names"), SCRIPTS)
def test_all_settings_are_saved_and_only_those_of_how_a_run_is_made_may_change(
    run, record, names, tmp_path, monkeypatch
):
    """All of these names differ from the record's, and are saved to the last digit."""
    monkeypatch.chdir(tmp_path)
    before = run.records[record]
    words = ["--record", record]
    for name in names:
        words += [f"--{name}", *show(another(before, name)).split(" ")]
    words += [*SIZES.split(), *FILES]
    train_gpt.main(words, run)
    saved = load_checkpoint("logs/it/state_step000002.pt", run)["hyperparameters"]
    assert saved == parse_args(words, run)[0]
    assert not [name for name in names if getattr(saved, name) == getattr(before, name)]

    for name in vars(saved).keys() - OF_RUN:
        now = replace(saved, resume=True, **{name: another(saved, name)})
        with pytest.raises(UserError, match=re.escape(f" --{name} {show(getattr(now, name))}")):
            beginning(run, now, None)
    changed = {name: another(saved, name) for name in OF_RUN} | {"run_id": "it", "resume": True}
    assert beginning(run, replace(saved, **changed), None)["step"] == 2


def test_a_checkpoint_of_other_settings_is_another_script_s(run):
    """Its record has the name of one of the fork's, too."""
    path = run.folder / "logs/it/state_step000008.pt"
    with pytest.raises(UserError, match="is a checkpoint of another edition of train_gpt.py"):
        load_checkpoint(path, train_gpt_2026.Run)


# ---- damage


def damage(path: Path) -> bytes:
    """Return a checkpoint with a flipped bit in a weight."""
    weight = torch.load(path, weights_only=True)["model"]["embed.weight"].numpy().tobytes()
    changed = bytes([weight[0] ^ 1]) + weight[1:]
    return path.read_bytes().replace(weight, changed)


def test_a_damaged_checkpoint_is_refused_and_gives_way_when_it_is_deleted(
    run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run.folder / "logs/it", "logs/it")
    newest = Path("logs/it/state_step000008.pt")
    words = [*run.flags, "--resume", "on"]
    whole = newest.read_bytes()
    for broken in (damage(newest), whole[:-1000], b"nothing", b""):
        newest.write_bytes(broken)
        status, err = error_of(words, capsys)
        gc.collect()  # closes its log
        assert status == 1 and "state_step000008.pt is not an intact checkpoint" in err
    newest.unlink()
    out = console_of(words, tmp_path)
    assert "resumed at step 6" in out and val_losses(out) == {8: run.losses[8]}


HEAD = "head 32"


def with_state(state: dict, change) -> dict:
    """Return a checkpoint whose Adam has another average for the head."""
    head = state["optimizers"][HEAD]
    head = head | {"exp_avg": change(head["exp_avg"])}
    return state | {"optimizers": state["optimizers"] | {HEAD: head}}


def without(state: dict, group: str) -> dict:
    return {name: of for name, of in state["optimizers"].items() if name != group}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"optimizers": s["optimizers"] | {"new": {}}}, "not one of this model: its"),
        (lambda s: s | {"model": s["model"] | {"new": torch.ones(1)}}, "model: Error(s) in"),
        (lambda s: s | {"optimizers": without(s, HEAD)}, "not one of this model: its groups"),
        (lambda s: with_state(s, lambda value: value[:, :1]), f"{HEAD}: exp_avg has .* [512, 1]"),
    ],
)
def test_a_checkpoint_of_another_edition_of_the_script_is_refused_in_a_line(
    change, message, run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("logs/it").mkdir(parents=True)
    state = torch.load(run.folder / "logs/it/state_step000006.pt", weights_only=True)
    torch.save(change(state), "logs/it/state_step000006.pt")
    _, err = error_of([*run.flags, "--resume", "on"], capsys)
    gc.collect()  # closes its log
    assert re.search(re.sub(r"[][()]", r"\\\g<0>", message), err)


def test_state_of_another_precision_is_taken_over_in_that_of_the_rule(run, tmp_path, monkeypatch):
    """As it may be on another device, or another number of ranks."""
    monkeypatch.chdir(tmp_path)
    Path("logs/it").mkdir(parents=True)
    state = torch.load(run.folder / "logs/it/state_step000006.pt", weights_only=True)
    rounded = with_state(state, torch.Tensor.bfloat16)
    rounded["optimizers"]["scalar "] = rounded["optimizers"].pop("scalar")  # its name of old
    torch.save(rounded, "logs/it/state_step000006.pt")
    words = [*run.flags, "--resume", "on", "--save_every", "1", "--keep", "9"]
    losses = val_losses(console_of(words, tmp_path))
    assert losses[8] == pytest.approx(run.losses[8], abs=1e-3)
    saved = torch.load("logs/it/state_step000007.pt", weights_only=True)
    assert saved["optimizers"][HEAD]["exp_avg"].dtype == torch.float32


class Evil:
    """Unpickled, it makes a folder."""

    def __reduce__(self):
        return Path.mkdir, (Path("made"),)


def test_the_highest_steps_are_kept_and_the_one_that_is_saved(tmp_path):
    """Whenever they were saved: a run may resume from a copy of an older checkpoint."""
    for step in (9, 5, 10**6, 3):
        train_gpt.save_checkpoint(tmp_path / f"state_step{step:06}.pt", {}, keep=3)
    assert [int(path.stem[10:]) for path in train_gpt.checkpoints(tmp_path)] == [10**6, 9, 3]


def test_nothing_in_a_checkpoint_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {}, "optimizers": Evil()}, "it.pt")
    with pytest.raises(UserError, match="is not an intact checkpoint"):
        load_checkpoint("it.pt", train_gpt.Run)
    assert not Path("made").exists()
