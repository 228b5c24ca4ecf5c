"""forks/train_gpt_track3.py against its specification in float64, and the optimizer that README
shows."""

import importlib
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import train_gpt
import train_gpt_track3 as track
from logfile import read_log
from reference import attend, frequencies_of, relative_error, rms_norm, rope
from runs import Program, assert_close, console_of, error_of, outcome
from train_gpt import HERE, train_step
from train_gpt_track3 import RECORDS, Hyperparameters, Optimizers, Run

MUON, ADAMW = RECORDS["muon"], RECORDS["adamw"]
OWN = re.search(
    r"```python\n([^`]*train_gpt_track3.*?)```", (HERE / "forks/README.md").read_text("utf-8"), re.S
)[1]
main = partial(train_gpt.main, run=Run)
SIZES = {"vocab_size": 256, "model_dim": 32, "num_heads": 2, "head_dim": 16, "num_layers": 2}
SHORT = {"context_len": 128, "seq_len": 128, "batch_seqs": 2, "num_iterations": 9}

# -----------------------------------------------------------------------------
# Model


rms = partial(rms_norm, epsilon=2.0**-23)


def loss_of_context(w: dict, hp: Hyperparameters, tokens, targets) -> torch.Tensor:
    """Return the summed loss of one context, from float64 weights by their names."""
    x = rms(w["embed.weight"][tokens]) * w["norm1.gains"]
    visible = torch.ones(len(tokens), len(tokens)).tril().bool()
    for i in range(hp.num_layers):
        own = {n.removeprefix(f"blocks.{i}."): v for n, v in w.items() if f"blocks.{i}." in n}

        def linear(name, x, own=own):
            return x @ own[f"{name}.weight"].T + own[f"{name}.bias"]

        h = rms(x) * own["norm1.gains"]
        q, k, v = (linear(name, h).view(len(h), hp.num_heads, -1) for name in "qkv")
        q, k = (rope(rms(part), frequencies_of(2025, hp.head_dim)) for part in (q, k))
        x = x + linear("attn_proj", attend(q, k, v, visible, 0.12).flatten(1))
        x = x + linear("mlp_proj", linear("fc", rms(x) * own["norm2.gains"]).clamp(min=0) ** 2)
    logits = (rms(x) * w["norm2.gains"]) @ w["lm_head.weight"].T + w["lm_head.bias"]
    logits = 15 * logits / (logits**2 + 225).sqrt()
    right = logits[torch.arange(len(targets)), targets]
    return (logits.logsumexp(1) - right).sum()


@pytest.mark.parametrize("on", [False, True])
def test_loss_and_gradients_are_those_of_the_specification(on, randomize, monkeypatch):
    """Gradients are of the sum over the whole batch, two micro-batches of two contexts, or with
    mean_loss of the mean."""
    contexts = {"context_len": 128, "seq_len": 256, "batch_seqs": 2}
    hp = replace(RECORDS["demo"], **SIZES, **contexts, float32_gains=on, mean_loss=on)
    model = randomize(track.GPT(hp))
    weights = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    tokens = torch.randint(256, (2, 257), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    losses = []
    for x, y in zip(inputs.reshape(4, 128), targets.reshape(4, 128), strict=True):
        losses.append(loss_of_context(weights, hp, x, y))
    sum(losses).backward()

    optimizers, found = Optimizers(model, hp), dict(model.named_parameters())
    monkeypatch.setattr(optimizers, "step", lambda now: {})
    loss = train_step(model, optimizers, inputs.int(), targets, Run.Moment(0, hp))["loss"]
    assert loss.item() == pytest.approx(sum(losses).item() / 512, rel=1e-6)
    assert len(found) == 5 + 14 * hp.num_layers
    sums = {}
    for _, of_group in optimizers.groups:
        sums |= zip(of_group.params, of_group.grad_views, strict=True)
    for name, p in found.items():
        grad = sums[p] / hp.batch_seqs  # as Optimizers.step divides
        expected = weights[name].grad / (512 if on else 1)
        assert relative_error(grad, expected) < 2e-5, name


@pytest.mark.parametrize("in_float32", [False, True])
def test_norms_have_the_published_epsilon(in_float32):
    x = 1e-4 * torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    layer = track.RMSNorm(replace(MUON, model_dim=32, float32_gains=in_float32))
    torch.testing.assert_close(layer(x), rms(x.double()).float())


def test_the_embedding_is_bfloat16_on_a_gpu_unless_a_setting_keeps_it_in_float32():
    for keeps in (False, True):
        model = track.GPT(replace(RECORDS["demo"], **SIZES, float32_embed=keeps))
        assert model.tables() == ([] if keeps else [model.embed, model.value_embeds])


def test_both_records_have_the_benchmarks_number_of_parameters():
    for hp in (MUON, ADAMW):
        with torch.device("meta"):
            model = track.GPT(hp)
        assert sum(p.numel() for p in model.parameters()) == 162_354_816


# -----------------------------------------------------------------------------
# Schedule


def test_demos_have_their_share_of_steps():
    demo = RECORDS["adamw-demo"]
    assert (demo.num_iterations, demo.warmup_steps) == (320, 15)  # 250 / 5625 of 320
    assert RECORDS["row_floor-demo"].momentum_warmup_steps == 36  # 300 / 2690 of 320


def test_runs_validate_every_125_steps_and_every_25_from_nine_tenths_on():
    moments = [Run.Moment(step, MUON) for step in range(3251)]
    found = [now.step for now in moments if now.validate]
    assert found == [*range(0, 2925, 125), *range(2925, 3251, 25)]


# -----------------------------------------------------------------------------
# The command line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--fp8 on", "--fp8: the benchmark's"),
        ("--record muon --val_seq_len 1152 --val_tokens 11520", "--val_seq_len 1152: must be a"),
        ("--optimizer sopa", "--optimizer sopa: must be one of adamw, adamh, muon, "),
    ],
)
def test_settings_that_the_model_does_not_have_are_refused(flags, message, capsys):
    status, err = error_of(flags.split(), capsys, main)
    assert status == 1 and err.startswith(f"train_gpt_track3.py: error: {message}")


def test_a_cpu_does_not_begin_a_run_of_full_size(capsys, monkeypatch):
    """Tools, whose __main__ has no Run, look at such runs."""
    assert train_gpt.parse_args(["--record", "soap"], Run)[1] == "soap"
    monkeypatch.setattr(sys.modules["__main__"], "Run", Run, raising=False)
    status, err = error_of(["--record", "soap"], capsys, main)
    size = "3125 steps of 524288 tokens need a GPU"
    assert status == 1 and f"{size}: put -demo behind the record's name, as in --rec" in err


# -----------------------------------------------------------------------------
# All records


def steps_of(hp: Hyperparameters, first: int, saved: dict | None = None) -> tuple[list, dict]:
    """Train from a step to the last one, as a run that begins or goes on. Return the losses, and
    what a checkpoint has before the last step."""
    torch.manual_seed(0)
    model = track.GPT(hp)
    optimizers, losses = Optimizers(model, hp), []
    tokens = torch.randint(256, (2, 129), generator=torch.Generator().manual_seed(0))
    batch = tokens[:, :-1].int(), tokens[:, 1:]
    if saved:
        train_step(model, optimizers, *batch, Run.Moment(hp.num_iterations - 1, hp))  # the warm-up
        model.load_state_dict(saved["model"])
        optimizers.load_state_dict(saved["optimizers"])
    for step in range(first, hp.num_iterations):
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        saved = {"model": weights, "optimizers": optimizers.state_dict()}
        losses.append(train_step(model, optimizers, *batch, Run.Moment(step, hp))["loss"])
    return [*losses, *(p.detach().clone() for p in model.parameters())], saved


@pytest.mark.parametrize("record", sorted(track.catalog.RESULTS))
def test_each_record_goes_on_bit_for_bit(record):
    """Also within all that goes around an optimizer, and with the head's eigenvectors."""
    hp = replace(RECORDS[f"{record}-demo"], **SIZES, **SHORT, outer_period=4)
    hp = replace(hp, ema_nesterov=(0.5, 0.2, 1.0), tail_ema=(0.6, 0.5), anchor=(0.45, 0.6, 0.9))
    hp = replace(hp, rre=(0.1, 0.875, 0.001), head_eigenvectors=True, float32_embed=True)
    steps_of(hp, 8)  # as the warm-up, which makes no steps before
    whole, saved = steps_of(hp, 0)
    again, _ = steps_of(hp, 8, saved)
    of_head = saved["optimizers"]["head 32"]
    assert {"average move", "outer momentum", "tail average"} <= of_head.keys()
    assert saved["optimizers"]["head 32, shared"].keys() == {"covariance", "basis"}
    assert "weights 3 before" in saved["optimizers"]["v 32x32"]
    assert whole[0].item() > whole[8].item()
    for a, b in zip(whole[8:], again, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("covariance", torch.zeros(31, 32)),
        ("basis", torch.zeros(32, 32, dtype=torch.int32)),
        ("mean", torch.zeros(32, 32)),
    ],
)
def test_what_ranks_share_is_checked_when_it_is_loaded(key, value):
    hp = replace(RECORDS["spectral_annealing-demo"], **SIZES, **SHORT)
    saved = steps_of(hp, 7)[1]
    saved["optimizers"]["head 32, shared"][key] = value
    with pytest.raises(RuntimeError, match=f"head 32, shared: {key} is {value.dtype}"):
        steps_of(hp, 8, saved)
    saved["optimizers"]["tail 32, shared"] = saved["optimizers"].pop("head 32, shared")
    with pytest.raises(RuntimeError, match="its groups are .*, tail 32, shared"):
        steps_of(hp, 8, saved)


def trains_as(hp: Hyperparameters, expected: list[torch.Tensor]) -> bool:
    """Say whether losses and last weights are these, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(steps_of(hp, 0)[0], expected, strict=True))


@pytest.mark.parametrize(
    ("name", "value", "given"),
    [
        ("ema_nesterov", (0.0, 0.1, 0.5), {}),
        ("ema_nesterov", (0.3, 0.5, 0.5), {}),
        ("rre", (0.1, 0.0, 0.1), {}),
        ("rre", (0.1, 0.5, 0.0), {}),
        ("rre", (1.5, 0.5, 0.1), {}),
        ("tail_shares", (0.5, 0.5, 0.5, 0.5, 0.0), {}),
        ("tail_ema", (0.1, 0.0), {}),
        ("tail_ema", (0.1, 0.5), {"tail_shares": (0.0,) * 5}),
        ("anchor", (0.5, 0.2, 0.5), {}),
        ("schedule_skip", (0.5, 0.0), {}),
        ("cautious_decay", True, {"muon_decay": 0.0}),
        ("momentum_cooldown", (0.1, 0.5), {}),
        ("outer_period", 10**6, {}),
        ("norm_control", "floor", {"muon_decay": 0.0}),
        ("floor_rows", True, {}),
    ],
)
def test_a_setting_without_effect_is_refused(name, value, given):
    """It changes nothing beside what is given and `muon`'s other values."""
    control = "radius" if name == "floor_rows" else "decay"
    hp = replace(RECORDS["muon-demo"], **SIZES, **SHORT | {"num_iterations": 5}, **given)
    hp = replace(hp, init="scaled_torch", norm_control=control, float32_embed=True)
    refused = replace(hp, **{name: value}, tokenizer="none")
    assert trains_as(refused, steps_of(hp, 0)[0])
    with pytest.raises(train_gpt.UserError, match=f"--{name} .*(has no effect|begin must be)"):
        track.check(refused)


def test_all_settings_of_records_have_an_effect():
    for hp in RECORDS.values():
        track.check(hp)


@pytest.mark.parametrize("optimizer", track.catalog.OPTIMIZERS)
def test_settings_that_an_optimizer_does_not_read_are_those_without_effect(optimizer):
    hp = replace(RECORDS[f"{optimizer}-demo"], **SIZES, **SHORT | {"num_iterations": 3})
    hp = replace(hp, init="scaled_torch", update_floor=5.0, precondition_frequency=1)
    usual = steps_of(hp, 0)[0]
    changes = {"matrix_beta2": 0.8, "momentum_damped": False, "norm_control": "radius"}
    changes |= {"muon_decay": 0.2, "cautious_decay": True, "precondition_frequency": 2}
    changes |= {"update_floor": 7.0, "floor_rows": True}
    for name, value in changes.items():
        changed = replace(hp, **{name: value})
        is_unread = name in dict(track.without_effect(changed))
        assert is_unread == trains_as(changed, usual) or value == getattr(hp, name), name


def test_the_table_says_what_each_optimizer_keeps_and_multiplies(monkeypatch):
    """Counted at the benchmark's size, in a late step, on tensors without numbers."""
    shapes = [("muon", 24, 768, 768), ("v", 12, 768, 768), ("attn_proj", 12, 768, 768)]
    shapes += [("muon", 12, 3072, 768), ("muon", 12, 768, 3072)]
    text = (HERE / "forks/README.md").read_text("utf-8")
    table = re.findall(r"^\| `(\w+)` \| (\w+) \| (\d+) \|.*\| ([\d.]+) \| ([\d.]+)", text, re.M)
    assert {row[0] for row in table} == track.catalog.RESULTS.keys()

    def drawn(bank, seeds, *shape):
        return bank.shard.new_empty(len(bank.shard), *shape)

    for module in ("psgd", "pmuon"):
        monkeypatch.setattr(f"{module}.noise", drawn)
    counted = {}
    for record, _, steps, kept, tera in table:
        hp, state, flops = RECORDS[record], 0, 0
        assert hp.num_iterations == int(steps)
        for name, count, *shape in shapes if hp.optimizer not in counted else ():
            params = [torch.nn.Parameter(torch.empty(shape, device="meta"))]
            bank = train_gpt.Bank(train_gpt.Group(name, params, None, 0.0, 2), params, 0, 1, 1)
            bank.shard_grad = bank.shard
            step = partial(track.catalog.OPTIMIZERS[hp.optimizer], bank, 0.0)
            step(Run.Moment(0, hp), hp)
            step(Run.Moment(2501, hp), hp)
            with FlopCounterMode(display=False) as counter:
                step(Run.Moment(2502, hp), hp)
            flops += count * counter.get_total_flops()
            state += count * sum(value.numel() for value in bank.state.values())
        state, flops = counted.setdefault(hp.optimizer, (state, flops))
        around = 2 * bool(hp.ema_nesterov[0]) + 2 * bool(hp.outer_period) + bool(hp.tail_ema[1])
        around += 3 * bool(hp.rre[1])
        assert f"{state / (144 * 768**2) + around:.1f}".removesuffix(".0") == kept, record
        assert f"{flops / 1e12:.1f}".removesuffix(".0") == tera.removesuffix(".0"), record


# -----------------------------------------------------------------------------
# The optimizer that README shows


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return main of README's file, beside a copy of the fork in a folder of its own."""
    monkeypatch.setitem(track.catalog.OPTIMIZERS, "row_adam", None)  # not there at the end
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my_optimizer.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path / "mine")
    module = importlib.import_module("my_optimizer")
    yield partial(train_gpt.main, run=module.Run)
    del sys.modules["my_optimizer"]


def test_python_starts_it_from_any_folder(tmp_path):
    (tmp_path / "my_optimizer.py").write_text(OWN)
    words = [sys.executable, tmp_path / "my_optimizer.py", "--help"]
    ended = subprocess.run(words, cwd=HERE, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "--optimizer" in ended.stdout, ended.stderr


def test_it_is_the_same_on_two_ranks_and_resumed(own, flags, tmp_path):
    """After step 2 it is resumed bit for bit, with a state of a shape of its own; on two ranks it
    is the same up to rounding. So is all that goes around it."""
    words = [*flags, "--run_id", "it", "--save_every", "2", "--keep", "9"]
    more = "--context_len 128 --adam_eps 1e-6 --muon_lr 0.002 --optimizer row_adam "
    more += "--head_eigenvectors on --ema_nesterov 30 0 0.5 --tail_ema 0.5 0.5 "
    more += "--anchor 0.45 0 0.5 --float32_embed on --rre 0 0.875 0.5"
    words += more.split()
    two = Program(words, ranks=2, work=own)
    assert two.end() == [0, 0], two.text("err")
    alone = tmp_path / "alone"
    alone.mkdir()
    console_of(words, alone, own)
    whole = outcome(alone, 4, own.keywords["run"])
    optimizers = {path.name for path in (HERE / "forks/optimizers").glob("*.py")}
    assert {*optimizers, "train_gpt_track3.py"} <= read_log(alone / "logs/it.txt").files.keys()
    assert_close(outcome(tmp_path, 4, own.keywords["run"]), whole)

    name = "logs/it/state_step000002.pt"
    kept = torch.load(alone / name, weights_only=True)["optimizers"]["muon 256x64"]
    shapes = {key: tuple(value.shape) for key, value in kept.items()}
    assert shapes["first"] == (4, 256, 64) and shapes["second"] == (4, 256, 1)
    (alone / "logs/it/state_step000004.pt").unlink()
    console_of([*words, "--resume", "on"], alone, own)
    again = outcome(alone, 4, own.keywords["run"])
    assert again.rows == whole.rows
    assert all(torch.equal(again.tensors[name], value) for name, value in whole.tensors.items())
