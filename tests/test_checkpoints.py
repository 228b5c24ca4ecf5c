"""Checkpoints: what they hold, which ones load, and what is refused."""

import contextlib
import dataclasses
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import language
from runs import console_of, val_losses

import train_gpt
from train_gpt import (
    GPT,
    LAYERS_2024,
    RECORDS,
    Hyperparameters,
    Run,
    UserError,
    load_checkpoint,
    main,
    names_about,
    parse_args,
)

LEARNING = names_about(Hyperparameters, "learning")


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


# ---- evaluation


@pytest.mark.parametrize("step", [4, 8])
def test_a_checkpoint_evaluates_to_the_loss_of_its_step(step, run, tmp_path, monkeypatch, capsys):
    """Under the window of that step."""
    monkeypatch.chdir(tmp_path)
    main(["--eval", str(run.paths[step]), "--device", "cpu"])
    expected = f"val_loss:{run.losses[step]:.4f} over 1024 tokens, {run.paths[step]}"
    assert expected in capsys.readouterr().out
    assert not Path("logs").exists()


def test_a_published_checkpoint_loads(flags, tmp_path, capsys, randomize):
    """It has torch.compile's prefix in its names, bfloat16 embeddings, and no settings."""
    hp, _ = parse_args(flags, Run)
    model = randomize(GPT(hp))
    model.embed.bfloat16().float()  # so that saving in bfloat16 loses nothing
    weights = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    weights["_orig_mod.embed.weight"] = weights["_orig_mod.embed.weight"].bfloat16()
    torch.save({"step": 9, "code": "", "model": weights, "optimizers": [{}, {}]}, "published.pt")
    main([*flags, "--eval", "published.pt"])
    inputs, targets = next(
        train_gpt.distributed_data_generator(hp.val_files, hp.val_seq_len, 8, 0, 1)
    )
    window = train_gpt.get_window_size(hp.num_iterations, hp)
    with torch.no_grad():
        losses = [model(x, y, window).item() for x, y in zip(inputs, targets, strict=True)]
    assert f"val_loss:{np.mean(losses):.4f} " in capsys.readouterr().out


# ---- settings


TINY = {
    "model_dim": 32,
    "num_heads": 4,
    "head_dim": 16,
    "vocab_size": 50304,
    "seq_len": 128,
    "val_seq_len": 256,
    "val_tokens": 512,
    "batch_seqs": 2,
    "num_iterations": 2,
    "epochs": 0,
    "layers": LAYERS_2024,
    "num_layers": 2,
    "window_min": 256,
}


def another(name: str, hp: Hyperparameters, texts=TINY, check=train_gpt.check):
    """Return a legal value of the setting that differs from hp's; of a text, that in `texts`."""
    (f,) = (f for f in dataclasses.fields(hp) if f.name == name)
    value = getattr(hp, name)
    if f.type is bool:
        return not value
    if f.metadata["choices"]:
        return next(choice for choice in f.metadata["choices"] if choice != value)
    if f.type is str:
        return texts[name]
    if isinstance(value, tuple):
        return tuple(x / 2 for x in value)
    others = [value + 1, value * 2 or 2, value + 2]
    if f.type is float:
        others = [value / 2 or 0.5]
    for other in others:
        with contextlib.suppress(UserError):
            check(replace(hp, **{name: other}))
            return other
    raise ValueError(f"{name} {value}")


def typed(name: str, value) -> list[str]:
    """Return a setting as words of the command line, to the last digit."""
    text = repr(value) if type(value) is float else train_gpt.show(value)
    return [f"--{name}", *text.split()]


def test_every_learning_setting_survives_a_checkpoint(tmp_path, monkeypatch):
    """All differ from the record's but two, which do not fit the others."""
    monkeypatch.chdir(tmp_path)
    own = RECORDS["demo"]
    others = [name for name in LEARNING if name not in ("rope", "grad_clip", *TINY)]
    changed = TINY | {name: another(name, own) for name in others}
    assert all(getattr(own, name) != value for name, value in changed.items())
    words = [word for name, value in changed.items() for word in typed(name, value)]
    words += ["--device", "cpu", "--compile", "off", "--save_every", "2", "--run_id", "it"]
    words += ["--record", "demo"]
    main(words)
    hp = load_checkpoint("logs/it/state_step000002.pt", Run)["hyperparameters"]
    assert {name: getattr(hp, name) for name in changed} == changed
    assert len(changed) == len(LEARNING) - 2
    assert hp == replace(parse_args(words, Run)[0], device="auto", compile="auto")
    saved = torch.load("logs/it/state_step000002.pt", weights_only=True)["hyperparameters"]
    names = {f.name for f in dataclasses.fields(Hyperparameters)}
    assert saved.keys() == names - {"device", "compile", "kernels"}


@pytest.mark.parametrize("name", LEARNING)
def test_to_resume_with_any_learning_setting_changed_is_refused_by_name(name, run):
    path = str(run.paths[4])
    was = load_checkpoint(path, Run)["hyperparameters"]
    now = another(name, was)
    text = f"{name} {train_gpt.show(getattr(was, name))} -> {train_gpt.show(now)}"
    words = ["--resume", path, *typed(name, now)]
    with pytest.raises(UserError, match=re.escape(text)):
        parse_args(words, Run)
    hp, _ = parse_args([*words, "--resume_force"], Run)
    assert getattr(hp, name) == now != getattr(was, name)


# ---- checkpoints of other programs, and of other versions of this one


def test_a_setting_that_a_checkpoint_lacks_is_that_of_its_record(run, saved, tmp_path):
    lost = ("norm_eps", "momentum_damped", "muon_lr")
    for name in lost:
        del saved["hyperparameters"][name]
    saved["record"] = "2024-11-24_WindowWarmup"
    found = load_checkpoint(write(tmp_path / "it.pt", saved), Run)["hyperparameters"]
    whole = load_checkpoint(run.paths[4], Run)["hyperparameters"]
    record = RECORDS[saved["record"]]
    own = {name: getattr(record, name) for name in lost}
    assert found == replace(whole, **own) and not record.momentum_damped


def test_to_go_on_with_other_source_is_said_and_ends_alike(
    run, saved, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert saved["code"] == Path(train_gpt.__file__).read_text()
    ours = load_checkpoint(run.paths[8], Run)["model"]
    saved["seconds"] = 1000.0
    saved["code"] = "another"
    write(Path("logs/it/state_step000004.pt"), saved)
    main(["--resume", "auto", "--device", "cpu"])
    out = capsys.readouterr().out
    line = "\nresumed at step 4; the source has changed since\n"
    assert line in out and line in Path("logs/it.txt").read_text()
    assert val_losses(out) == {8: run.losses[8]}
    assert re.search(r"val_loss:\S+ train_time:100\d{4}ms", out)
    found = load_checkpoint("logs/it/state_step000008.pt", Run)["model"]
    assert all(torch.equal(found[name], weight) for name, weight in ours.items())


# ---- damage


def damage(path: Path) -> None:
    """Flip a bit of a weight."""
    weight = torch.load(path, weights_only=True)["model"]["embed.weight"].numpy().tobytes()
    changed = bytes([weight[0] ^ 1]) + weight[1:]
    path.write_bytes(path.read_bytes().replace(weight, changed))


def test_a_damaged_checkpoint_gives_way_to_the_one_before(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run.folder / "logs/it", "logs/it")
    newest = Path("logs/it/state_step000008.pt")
    damage(newest)
    words = ["--resume", "auto", "--run_id", "it", "--device", "cpu"]
    main(words)
    out, err = capsys.readouterr()
    assert not err and "state_step000008.pt is not an intact checkpoint" in out
    assert re.search(r"its part \S+ is damaged", out)
    assert "resumed at step 4" in out and val_losses(out) == {8: run.losses[8]}
    for path in Path("logs/it").glob("*.pt"):
        path.write_bytes(b"nothing")
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "no intact checkpoint of train_gpt.py is among 2" in capsys.readouterr().err


def test_pruning_keeps_the_newest_not_the_furthest(run, tmp_path, monkeypatch, capsys):
    """When a run goes on from an older checkpoint, those of the abandoned branch go first."""
    monkeypatch.chdir(tmp_path)
    flags = [*run.flags, "--val_loss_every", "0", "--run_id", "it"]
    main([*flags, "--keep", "9", "--save_every", "2"])
    names = sorted(path.name for path in tmp_path.glob("logs/it/*"))
    assert names == [f"state_step{step:06}.pt" for step in (2, 4, 6, 8)]
    shorter = ["--num_iterations", "4", "--resume_force"]
    main([*flags, "--resume", f"logs/it/{names[0]}", "--keep", "2", *shorter])
    assert "resumed at step 2" in capsys.readouterr().out
    kept = sorted(path.name for path in tmp_path.glob("logs/it/*"))
    assert kept == ["state_step000004.pt", "state_step000008.pt"]
