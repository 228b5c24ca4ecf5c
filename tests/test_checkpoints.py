"""Checkpoints: what they hold, which ones load, and what is refused."""

import contextlib
import dataclasses
import hashlib
import io
import os
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import language
from runs import console_of, error_of, val_losses

import train_gpt
from records import LAYERS_2024
from train_gpt import (
    GPT,
    LEARNING_FIELDS,
    RECORDS,
    Hyperparameters,
    UserError,
    load_checkpoint,
    main,
    parse_args,
)


def write(path: Path, state: dict) -> Path:
    """A checkpoint of this program, as its format is described: with its checksum at the end."""
    data = io.BytesIO()
    torch.save(state, data)
    path.parent.mkdir(exist_ok=True, parents=True)
    digest = hashlib.sha256(data.getvalue()).digest()
    path.write_bytes(data.getvalue() + b"SHA-256:" + digest)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> SimpleNamespace:
    """A run of eight steps that saves in the middle: flags, losses, checkpoints by step."""
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
    """What the run saved in the middle."""
    return torch.load(run.paths[4], weights_only=True)


# ---- evaluation


@pytest.mark.parametrize("step", [4, 8])
def test_a_checkpoint_evaluates_to_the_loss_of_its_step(step, run, tmp_path, monkeypatch, capsys):
    """Under the window of that step. It knows its model and not its places."""
    monkeypatch.chdir(tmp_path)
    Path("elsewhere.pt").write_bytes(run.paths[step].read_bytes())
    Path("other.bin").write_bytes((run.folder / "val_0.bin").read_bytes())
    main(["--eval", "elsewhere.pt", "--val_files", "other.bin", "--device", "cpu"])
    expected = f"val_loss:{run.losses[step]:.4f} over 1024 tokens, elsewhere.pt"
    assert expected in capsys.readouterr().out
    assert not Path("logs").exists()


def test_a_published_checkpoint_loads(flags, tmp_path, capsys, randomize):
    """Names with torch.compile's prefix, bfloat16 embeddings, and no settings of ours inside."""
    hp, _ = parse_args(flags)
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


TINY = {"model_dim": 32, "num_heads": 4, "head_dim": 16, "vocab_size": 50304, "seq_len": 128}
TINY |= {"val_seq_len": 256, "val_tokens": 512, "batch_seqs": 2, "num_iterations": 2, "epochs": 0}
TINY |= {"layers": LAYERS_2024, "num_layers": 2, "max_document_tokens": 64, "window_min": 256}
TINY |= {"tied_frac": 0.5}
WITH = {  # settings that cannot be on alone
    "paired_heads": "--num_heads 4",
    "gate_by_values": "--value_gate on",
    "sublayer_lambdas": "--x0_apart on",
}


def another(name: str, hp: Hyperparameters):
    """A legal value of the setting other than hp's."""
    (f,) = (f for f in dataclasses.fields(hp) if f.name == name)
    value = getattr(hp, name)
    if f.type is bool:
        return not value
    if "choices" in f.metadata:
        return next(choice for choice in f.metadata["choices"] if choice != value)
    if f.type is str:
        rows = {"layers": LAYERS_2024, "stages": "window=256,window=512"}
        return (rows | {"adam_groups": "scalar+lr=0.02"})[name]
    if isinstance(value, tuple):
        return tuple(x / 2 for x in value)
    for other in [value / 2 or 0.5] if f.type is float else [value + 1, value * 2 or 2, value + 2]:
        with contextlib.suppress(UserError):
            train_gpt.check(replace(hp, **{name: other}))
            return other
    raise ValueError(f"{name} {value}")


def typed(name: str, value) -> list[str]:
    """As words of the command line, to the last digit."""
    return [f"--{name}", *(repr(value) if type(value) is float else train_gpt.show(value)).split()]


def test_every_learning_setting_survives_a_checkpoint(tmp_path, monkeypatch):
    """A run in which each of them is another one than the record's, but for two that do not fit the
    others; what a machine has is gone."""
    monkeypatch.chdir(tmp_path)
    own = RECORDS["demo_2025-01-26"]
    others = [name for name in LEARNING_FIELDS if name not in ("rope", "grad_clip", *TINY)]
    changed = TINY | {name: another(name, own) for name in others}
    assert all(getattr(own, name) != value for name, value in changed.items())
    words = [word for name, value in changed.items() for word in typed(name, value)]
    words += ["--device", "cpu", "--compile", "off", "--save_every", "2", "--run_id", "it"]
    words += ["--record", "demo_2025-01-26"]
    main(words)
    hp = load_checkpoint("logs/it/state_step000002.pt")["hyperparameters"]
    assert {name: getattr(hp, name) for name in changed} == changed
    assert len(changed) == len(LEARNING_FIELDS) - 2
    assert hp == replace(parse_args(words)[0], device="auto", compile="auto")
    saved = torch.load("logs/it/state_step000002.pt", weights_only=True)["hyperparameters"]
    names = {f.name for f in dataclasses.fields(Hyperparameters)}
    assert saved.keys() == names - {"device", "compile", "kernels"}


@pytest.mark.parametrize("name", LEARNING_FIELDS)
def test_to_resume_with_any_learning_setting_changed_is_refused_by_name(name, run):
    path = str(run.paths[4])
    was = load_checkpoint(path)["hyperparameters"]
    now = another(name, was)
    text = f"{name} {train_gpt.show(getattr(was, name))} -> {train_gpt.show(now)}"
    words = ["--resume", path, *typed(name, now), *WITH.get(name, "").split()]
    with pytest.raises(UserError, match=re.escape(text)):
        parse_args(words)
    hp, _ = parse_args([*words, "--resume_force"])
    assert getattr(hp, name) == now != getattr(was, name)


def test_a_run_may_go_on_with_other_settings_of_the_run_and_of_the_machine(run):
    path, was = str(run.paths[4]), load_checkpoint(run.paths[4])["hyperparameters"]
    fields = {f.name: f for f in dataclasses.fields(was)}
    names = fields.keys() - set(LEARNING_FIELDS)
    assert {"train_files", "run_id", "save_every", "device"} < names and "seed" not in names
    texts = {"train_files": "a", "val_files": "b", "run_id": "c"}
    for name in names:
        value = texts.get(name) or another(name, was)
        assert getattr(parse_args(["--resume", path, *typed(name, value)])[0], name) == value


def test_a_new_setting_is_one_of_learning_unless_it_says_otherwise():
    (f,) = dataclasses.fields(
        dataclasses.make_dataclass("New", [("it", float, train_gpt.setting(1.0, "a new one"))])
    )
    assert f.metadata["about"] == "learning"


# ---- older checkpoints, and those of other programs


def as_of_7620c08(state: dict) -> dict:
    """What that commit would have saved: its source, its settings, nothing about kernels."""
    old = {key: value for key, value in state.items() if key != "kernels"}
    settings = dict(state["hyperparameters"])
    del settings["norm_eps"], settings["momentum_damped"]
    settings |= {"comm_dtype": "auto", "verify_data": False}
    return old | {"hyperparameters": settings, "code": '"""Train a GPT-2-small-sized ..."""\n'}


def test_a_checkpoint_of_an_older_program_evaluates_and_goes_on(
    run, saved, tmp_path, monkeypatch, capsys
):
    """That is 7620c08, which had other settings; a run ends as it would have."""
    monkeypatch.chdir(tmp_path)
    old = as_of_7620c08(saved)
    keys = "record hyperparameters code run_id step seconds model optimizers random"
    assert old.keys() == set(keys.split())
    path = write(Path("logs/it/state_step000004.pt"), old)
    main(["--eval", str(path), "--device", "cpu"])
    assert f"val_loss:{run.losses[4]:.4f} " in capsys.readouterr().out
    main(["--resume", "auto", "--device", "cpu"])
    out = capsys.readouterr().out
    assert "\nresumed at step 4; the source has changed since\n" in out
    assert val_losses(out) == {8: run.losses[8]}
    ours = load_checkpoint(run.paths[8])["model"]
    for name, weight in load_checkpoint("logs/it/state_step000008.pt")["model"].items():
        assert torch.equal(weight, ours[name]), name


def test_what_became_a_setting_later_is_as_it_was_for_an_older_checkpoint(saved, tmp_path):
    """Also of a record that now has another value: the run goes on as it began."""
    state = as_of_7620c08(saved) | {"record": "2024-11-24_WindowWarmup"}
    path = write(tmp_path / "old.pt", state)
    hp, now = load_checkpoint(path)["hyperparameters"], RECORDS[state["record"]]
    assert (hp.norm_eps, hp.momentum_damped) == (torch.finfo(torch.float32).eps, True)
    assert (now.norm_eps, now.momentum_damped) == (torch.finfo(torch.bfloat16).eps, False)
    with pytest.raises(UserError, match="momentum_damped on -> off"):
        parse_args(["--resume", str(path), "--record", state["record"]])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"no_such_setting": 1}, "no_such_setting"),
        ({"num_layers": 1}, "--num_layers 1: must be at least 2"),
    ],
)
def test_a_checkpoint_with_settings_that_cannot_be_is_refused(
    settings, words, saved, tmp_path, capsys
):
    saved["hyperparameters"] |= settings
    path = write(tmp_path / "it.pt", saved)
    status, err = error_of(["--eval", path, "--device", "cpu"], capsys)
    assert status == 2 and f"{path} is not a whole checkpoint of this program" in err
    assert words in err


def test_to_go_on_under_other_kernels_is_said_in_the_log(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for former, said in ((["relu2_mlp", "x"], "; its kernels were: relu2_mlp x\n"), ([], "\n")):
        write(Path("logs/it/state_step000004.pt"), saved | {"kernels": former})
        main(["--resume", "auto", "--device", "cpu", "--num_iterations", "5", "--resume_force"])
        line = f"\nresumed at step 4{said}"
        assert line in capsys.readouterr().out and line in Path("logs/it.txt").read_text()
        Path("logs/it.txt").unlink()


# ---- damage


def test_no_damage_passes_for_a_checkpoint(run, tmp_path):
    """20 lengths, among them those that cut into the checksum only, and 20 changed bytes."""
    whole, rng = run.paths[4].read_bytes(), random.Random(0)
    lengths = [0, 1, len(whole) - 1, len(whole) - 32, len(whole) - 40]
    lengths += [rng.randrange(len(whole)) for _ in range(15)]
    damaged = [whole[:length] for length in lengths] + [whole + b"0"]
    for _ in range(20):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        damaged.append(bytes(data))
    path = tmp_path / "state_step000001.pt"
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(UserError, match="state_step000001.pt is "):
            load_checkpoint(path)
    path.write_bytes(whole)
    assert load_checkpoint(path)["step"] == 4


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_a_pickle_bomb_executes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"step": 1, "model": Bomb()}, "bomb.pt")
    with pytest.raises(UserError, match="bomb.pt is not a whole checkpoint"):
        load_checkpoint("bomb.pt")
    assert not Path("exploded").exists()
    torch.load("bomb.pt", weights_only=False)
    assert Path("exploded").exists()  # it would have


def test_a_damaged_checkpoint_gives_way_to_the_one_before(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = Path("logs/it")
    folder.mkdir(parents=True)
    for step in (4, 8):
        (folder / f"state_step{step:06}.pt").write_bytes(run.paths[step].read_bytes())
    newest = folder / "state_step000008.pt"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    main(["--resume", "auto", "--device", "cpu"])
    out, err = capsys.readouterr()
    assert "state_step000008.pt is not a whole checkpoint" in err
    assert "(its checksum is wrong); trying the one before" in err
    assert "resumed at step 4" in out and val_losses(out) == {8: run.losses[8]}
    main(["--resume", "auto", "--device", "cpu"])  # it is whole again
    assert "the run had finished: step 8 of 8 is saved" in capsys.readouterr().out
    for path in folder.glob("*.pt"):
        path.write_bytes(b"nothing")
    with pytest.raises(SystemExit) as stop:
        main(["--resume", "auto", "--device", "cpu"])
    assert stop.value.code == 2
    assert "none of 2 checkpoints under logs/ is whole" in capsys.readouterr().err


def test_pruning_keeps_the_newest_not_the_furthest(run, tmp_path, monkeypatch, capsys):
    """Of a run that goes on from an older checkpoint, those of the abandoned branch go first."""
    monkeypatch.chdir(tmp_path)
    flags = [*run.flags, "--val_loss_every", "0", "--run_id", "it"]
    main([*flags, "--keep", "9", "--save_every", "2"])
    names = sorted(path.name for path in tmp_path.glob("logs/it/*"))
    assert names == [f"state_step{step:06}.pt" for step in (2, 4, 6, 8)]
    main([*flags, "--resume", f"logs/it/{names[0]}", "--keep", "2", "--save_every", "3"])
    assert "resumed at step 2" in capsys.readouterr().out
    kept = sorted(path.name for path in tmp_path.glob("logs/it/*"))
    assert kept == ["state_step000006.pt", "state_step000008.pt"]


def test_without_a_checkpoint_a_new_run_begins_and_says_so(flags, capsys):
    main([*flags, "--resume", "auto", "--num_iterations", "2"])
    out = capsys.readouterr().out
    assert "no checkpoint under logs/, a new run begins" in out and "step:2/2 val_loss" in out
