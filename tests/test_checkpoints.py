"""Checkpoints: what they hold, which ones load, and what is refused."""

import contextlib
import dataclasses
import os
import random
import re
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import language
from runs import console_of, error_of, val_losses

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
    """Under the window of that step, wherever the checkpoint and the data are."""
    monkeypatch.chdir(tmp_path)
    Path("elsewhere.pt").write_bytes(run.paths[step].read_bytes())
    Path("other.bin").write_bytes((run.folder / "val_0.bin").read_bytes())
    main(["--eval", "elsewhere.pt", "--val_files", "other.bin", "--device", "cpu"])
    expected = f"val_loss:{run.losses[step]:.4f} over 1024 tokens, elsewhere.pt"
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


TEXTS = {"layers": LAYERS_2024}


def another(name: str, hp: Hyperparameters, texts=TEXTS, check=train_gpt.check):
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
    """In this run all of them differ from the record's but two, which do not fit the others.
    Settings about the machine are not kept."""
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


def test_a_run_may_go_on_with_other_settings_of_the_run_and_of_the_machine(run):
    path = str(run.paths[4])
    was = load_checkpoint(path, Run)["hyperparameters"]
    names = vars(was).keys() - set(LEARNING)
    assert {"train_files", "run_id", "save_every", "device"} < names and "seed" not in names
    texts = {"train_files": "a", "val_files": "b", "run_id": "c"}
    for name in names:
        value = texts.get(name) or another(name, was)
        hp, _ = parse_args(["--resume", path, *typed(name, value)], Run)
        assert getattr(hp, name) == value


# ---- checkpoints of other programs, and of other versions of this one


@pytest.mark.parametrize("flag", ["--eval", "--resume"])
def test_a_checkpoint_of_another_script_is_refused_and_the_script_is_named(
    flag, saved, tmp_path, capsys
):
    """This script lacks its record, or one of its settings."""
    saved["script"] = "train_gpt_2026.py"
    settings = saved["hyperparameters"]
    for record, more in (("2026-03-06_SimplifyHC", {}), ("demo", {"stages": "window=256"})):
        saved["record"], saved["hyperparameters"] = record, settings | more
        path = write(tmp_path / "it.pt", saved)
        status, err = error_of([flag, path, "--device", "cpu"], capsys)
        assert status == 2
        assert f"{path} is a checkpoint of {record} of train_gpt_2026.py: start that script" in err


def test_a_checkpoint_with_illegal_settings_is_refused(saved, tmp_path):
    saved["hyperparameters"]["num_layers"] = 1
    with pytest.raises(UserError, match="--num_layers 1: must be even"):
        load_checkpoint(write(tmp_path / "it.pt", saved), Run)


def test_a_setting_that_a_checkpoint_lacks_is_that_of_its_record(run, saved, tmp_path):
    """As in a checkpoint that is older than the setting."""
    lost = ("norm_eps", "momentum_damped", "muon_lr")
    for name in lost:
        del saved["hyperparameters"][name]
    saved["record"] = "2024-11-24_WindowWarmup"
    found = load_checkpoint(write(tmp_path / "it.pt", saved), Run)["hyperparameters"]
    whole = load_checkpoint(run.paths[4], Run)["hyperparameters"]
    record = RECORDS[saved["record"]]
    own = {name: getattr(record, name) for name in lost}
    assert found == replace(whole, **own) and not record.momentum_damped


def test_to_go_on_with_other_source_or_kernels_is_said_and_ends_alike(
    run, saved, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert saved["code"] == Path(train_gpt.__file__).read_text()
    ours = load_checkpoint(run.paths[8], Run)["model"]
    saved["seconds"] = 1000.0
    for more, said in (
        ({"code": "another"}, "; the source has changed since"),
        ({"kernels": ["relu2_mlp", "x"]}, "; the kernels then were: relu2_mlp x"),
        ({}, ""),
    ):
        write(Path("logs/it/state_step000004.pt"), saved | more)
        main(["--resume", "auto", "--device", "cpu"])
        out, line = capsys.readouterr().out, f"\nresumed at step 4{said}\n"
        assert line in out and line in Path("logs/it.txt").read_text()
        assert val_losses(out) == {8: run.losses[8]}
        assert re.search(r"val_loss:\S+ train_time:100\d{4}ms", out)
        found = load_checkpoint("logs/it/state_step000008.pt", Run)["model"]
        assert all(torch.equal(found[name], weight) for name, weight in ours.items())
        shutil.rmtree("logs")


# ---- damage


def places(path: Path) -> dict[str, range]:
    """Return the positions in the file of the bytes of each of a checkpoint's records."""
    found = {}
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            assert info.compress_type == zipfile.ZIP_STORED
            lengths = data[info.header_offset + 26 :][:4]  # of the local header's name and extra
            start = info.header_offset + 30 + sum(np.frombuffer(lengths, "<u2").tolist())
            found[info.filename] = range(start, start + info.file_size)
    return found


def flip(path: Path, place: int) -> None:
    """Change a byte of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_in_any_record_of_a_checkpoint_is_noticed(run, tmp_path):
    path = tmp_path / "state_step000001.pt"
    whole = run.paths[4].read_bytes()
    rng = random.Random(0)
    found = {name: where for name, where in places(run.paths[4]).items() if where}
    assert len(found) > 50  # a record for each tensor, and the pickle
    for name, where in found.items():
        path.write_bytes(whole)
        flip(path, rng.choice(where))
        with pytest.raises(UserError, match=re.escape(f"its part {name} is damaged")) as error:
            load_checkpoint(path, Run)
        assert f"{path} is not an intact checkpoint" in str(error.value)


def test_a_cut_checkpoint_is_refused(run, tmp_path):
    path = tmp_path / "state_step000001.pt"
    whole = run.paths[4].read_bytes()
    for length in (0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 22, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="state_step000001.pt is not an intact checkpoint"):
            load_checkpoint(path, Run)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_a_pickle_bomb_executes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"step": 1, "model": Bomb()}, "bomb.pt")
    with pytest.raises(UserError, match="bomb.pt is not an intact checkpoint"):
        load_checkpoint("bomb.pt", Run)
    assert not Path("exploded").exists()
    torch.load("bomb.pt", weights_only=False)
    assert Path("exploded").exists()  # it would have


def test_a_damaged_checkpoint_gives_way_to_the_one_before(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run.folder / "logs/it", "logs/it")
    newest = Path("logs/it/state_step000008.pt")
    flip(newest, max(places(newest).values(), key=len)[7])
    words = ["--resume", "auto", "--run_id", "it", "--device", "cpu"]
    main(words)
    out, err = capsys.readouterr()
    assert not err and "state_step000008.pt is not an intact checkpoint" in out
    assert re.search(r"\(its part \S+ is damaged\); trying an older one", out)
    assert "resumed at step 4" in out and val_losses(out) == {8: run.losses[8]}
    main(words)  # it is whole again
    assert "the run is finished: step 8 of 8 is saved" in capsys.readouterr().out
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


def test_an_empty_run_id_means_any_run(run, monkeypatch):
    """As from a variable of the shell that is not set."""
    monkeypatch.chdir(run.folder)
    _, args = parse_args(["--eval", "auto", "--run_id", ""], Run)
    assert args.checkpoint == str(run.paths[8].relative_to(run.folder))
