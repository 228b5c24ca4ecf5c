"""Checkpoints: what they hold, which ones load, and what is refused."""

import dataclasses
import gc
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import small_fork
import torch
from conftest import at_window, language
from runs import console_of, error_of, val_losses

import train_gpt
from train_gpt import (
    GPT,
    RECORDS,
    Run,
    RunSettings,
    UserError,
    load_checkpoint,
    main,
    newest_checkpoint,
    parse_args,
    show,
)

FIELDS = {f.name: f for f in dataclasses.fields(train_gpt.Hyperparameters)}
OF_RUN = [f.name for f in dataclasses.fields(RunSettings)]


def write(path: Path, state: dict) -> Path:
    """Write a checkpoint, and return its path."""
    path.parent.mkdir(exist_ok=True, parents=True)
    torch.save(state, path)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> SimpleNamespace:
    """Train for eight steps and save twice. Return flags, losses, and checkpoints by step."""
    folder = tmp_path_factory.mktemp("run")
    flags = [*language(folder), "--num_iterations", "8", "--val_loss_every", "4"]
    flags += ["--window_span", "256", "--seq_len", "256"]
    flags += ["--model_dim", "32", "--num_heads", "1", "--batch_seqs", "2", "--val_tokens", "1024"]
    losses = val_losses(console_of([*flags, "--save_every", "4", "--run_id", "it"], folder))
    paths = {int(path.stem[-6:]): path for path in folder.glob("logs/it/*.pt")}
    assert sorted(paths) == [4, 8]
    return SimpleNamespace(flags=flags, folder=folder, losses=losses, paths=paths)


@pytest.fixture
def saved(run) -> dict:
    """Return what the run saved in the middle."""
    return torch.load(run.paths[4], weights_only=True)


def test_a_published_checkpoint_loads(flags, tmp_path, randomize):
    """It has torch.compile's prefix in its names, bfloat16 embeddings, and no settings."""
    hp, _ = parse_args(flags, Run)
    model = randomize(GPT(hp))
    weights = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    weights["_orig_mod.embed.weight"] = weights["_orig_mod.embed.weight"].bfloat16()
    state = {"step": 9, "code": "", "model": weights, "optimizers": [{}, {}]}
    found = load_checkpoint(write(tmp_path / "published.pt", state), Run)
    loaded = GPT(hp)
    loaded.load_state_dict(found["model"])
    model.embed.bfloat16().float()
    tokens = torch.arange(256, dtype=torch.int32)
    now = at_window(128, hp)
    with torch.no_grad():
        assert torch.equal(loaded(tokens, tokens.long(), now), model(tokens, tokens.long(), now))


# ---- settings


def another(name: str, value):
    """Return a value of a setting that differs from this one."""
    choices = get_args(FIELDS[name].type)
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return next(x for x in (choices or ("long,long,long,long",)) if x != value)
    if isinstance(value, tuple):
        return tuple(x / 3 for x in value)
    return value / 3 or 0.5 if isinstance(value, float) else value * 2 or 2


def test_all_settings_are_saved_to_the_last_digit(tmp_path, monkeypatch):
    """All differ from the record's."""
    monkeypatch.chdir(tmp_path)
    hp = RECORDS["demo"]
    small = {"num_iterations": 2, "layers": "long,short,short,long", "num_layers": 2, "epochs": 0}
    small |= {"seq_len": 128, "val_seq_len": 256, "val_tokens": 512, "batch_seqs": 2}
    small |= {"model_dim": 32, "head_dim": 16, "num_heads": 1, "vocab_size": 50304}
    small |= {"compile": "off", "device": "cpu", "run_id": "it", "keep": 1, "grad_clip": 1.7}
    small |= {"train_files": hp.val_files, "val_files": hp.train_files}
    words = ["--record", "demo"]
    for name, value in vars(hp).items():
        value = small.get(name, another(name, value))
        texts = [show(value) if isinstance(value, bool) else str(value)]
        words += [f"--{name}", *(map(str, value) if isinstance(value, tuple) else texts)]
    console_of(words, tmp_path)
    found = load_checkpoint("logs/it/state_step000002.pt", Run)["hyperparameters"]
    assert found == parse_args(words, Run)[0]
    assert not [name for name, value in vars(hp).items() if getattr(found, name) == value]


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in OF_RUN])
def test_to_go_on_with_a_setting_changed_is_refused_by_name(name, run, monkeypatch):
    monkeypatch.chdir(run.folder)
    was = load_checkpoint(run.paths[4], Run)["hyperparameters"]
    now = replace(was, resume=True, **{name: another(name, getattr(was, name))})
    with pytest.raises(UserError, match=re.escape(f" --{name} {show(getattr(now, name))}")):
        newest_checkpoint(Run, now)


def test_settings_of_how_a_run_is_made_may_change(run, monkeypatch):
    monkeypatch.chdir(run.folder)
    was = load_checkpoint(run.paths[4], Run)["hyperparameters"]
    changed = {name: "another" if getattr(was, name) == "" else 7 for name in OF_RUN}
    now = replace(was, **changed | {"resume": True, "run_id": "it"})
    assert newest_checkpoint(Run, now)["step"] == 8
    assert newest_checkpoint(Run, replace(now, resume=False)) == {}


# ---- checkpoints of other programs, and of other versions of this one


def test_a_checkpoint_of_other_settings_is_another_script_s(run, saved, tmp_path):
    with pytest.raises(UserError, match="is a checkpoint of another script, train_gpt.py"):
        load_checkpoint(run.paths[4], small_fork.Run)
    del saved["hyperparameters"]["norm_eps"]
    with pytest.raises(UserError, match="is a checkpoint of another script, train_gpt.py"):
        load_checkpoint(write(tmp_path / "it.pt", saved), Run)


def test_a_run_that_goes_on_adds_the_time_before_and_ends_alike(
    run, saved, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    ours = load_checkpoint(run.paths[8], Run)["model"]
    saved["seconds"] = 1000.0
    write(Path("logs/it/state_step000004.pt"), saved)
    main([*run.flags, "--resume", "on", "--run_id", "it"])
    out = capsys.readouterr().out
    line = "\nresumed at step 4\n"
    assert line in out and line in Path("logs/it.txt").read_text()
    assert val_losses(out) == {8: run.losses[8]}
    assert re.search(r"val_loss:\S+ train_time:100\d{4}ms", out)
    found = load_checkpoint("logs/it/state_step000008.pt", Run)["model"]
    assert all(torch.equal(found[name], weight) for name, weight in ours.items())


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
    words = [*run.flags, "--resume", "on", "--run_id", "it"]
    whole = newest.read_bytes()
    for broken in (damage(newest), whole[:-1000], b"nothing", b""):
        newest.write_bytes(broken)
        status, err = error_of(words, capsys)
        gc.collect()  # closes its log
        assert status == 1 and "state_step000008.pt is not an intact checkpoint" in err
    newest.unlink()
    main(words)
    out = capsys.readouterr().out
    assert "resumed at step 4" in out and val_losses(out) == {8: run.losses[8]}


class Evil:
    """Unpickled, it makes a folder."""

    def __reduce__(self):
        return Path.mkdir, (Path("made"),)


def test_nothing_in_a_checkpoint_is_executed(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for state in (saved | {"optimizers": Evil()}, Evil()):
        with pytest.raises(UserError, match="is not an intact checkpoint of this program"):
            load_checkpoint(write(tmp_path / "it.pt", state), Run)
    assert not Path("made").exists()


def test_the_newest_checkpoints_are_kept(run, tmp_path):
    console_of([*run.flags, "--keep", "3", "--save_every", "2", "--run_id", "it"], tmp_path)
    names = sorted(path.name for path in tmp_path.glob("logs/it/*"))
    assert names == [f"state_step{step:06}.pt" for step in (4, 6, 8)]
