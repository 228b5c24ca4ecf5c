"""README's fork, the hooks and the technique of forks/README.md do what the pages say; files and
flags that pages name exist; published results are the same on all pages."""

import re
import sys
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
import torch

import machine
import script
import train_gpt
from logfile import published
from runs import Program, rows
from test_scripts import launch_with, launched
from train_gpt import HERE

README = (HERE / "README.md").read_text("utf-8")
BENCHMARKS = (HERE / "BENCHMARKS.md").read_text("utf-8")
PAGES = [README, BENCHMARKS, (HERE / "CONTRIBUTING.md").read_text("utf-8")]
FORK = re.search(r"```python\n(.*?)```", README, re.S)[1]
OF_FORKS = (HERE / "forks" / "README.md").read_text("utf-8")
HOOKS = re.search(r"## Hooks.*?```python\n(.*?)```", OF_FORKS, re.S)[1]
TECHNIQUE = re.search(r"```diff\n(.*?)```", OF_FORKS, re.S)[1]
STEPS = 4


def gelu_mlp(mlp, x):
    """Return what the MLP would with GELU, from its definition by the error function."""
    h = x @ mlp.c_fc.weight.T
    return (h * (0.5 + 0.5 * torch.erf(h / 2**0.5))) @ mlp.c_proj.weight.T


def test_files_and_flags_that_pages_name_exist():
    for path in set(re.findall(r"\b(?:forks|tests|tools)/(?!my_)[\w/]+\.\w+", "\n".join(PAGES))):
        assert (HERE / path).exists(), path
    known = set()
    for path in script.of_project():
        run = script.load(path)
        known |= vars(run.records[run.default_record]).keys()
    for path in (HERE / "train_gpt.py", *HERE.glob("tools/*.py"), *HERE.glob("data/*.py")):
        known |= {*re.findall(r'"--(\w+)', path.read_text("utf-8"))}
    commands = " ".join(re.findall(r"\./run\.sh[^`\n]*", "\n".join(PAGES)))
    assert {*re.findall(r"--(\w+)", commands)} <= known


RESULT = r"([\d.]+) min; ([\d.]+)(?: ± ([\d.]+))?(?:, (\d+) runs?)?"  # in README
SAME = r"(?P<mean>[\d.]+)(?: ± (?P<deviation>[\d.]+))? \((?P<runs>\d+)\), (?P<minutes>[\d.]+)"


def test_published_results_on_pages_are_those_that_tools_read():
    found = {}
    for line in README.splitlines():
        if match := re.match(rf"\| (.*?) \| .* \| {RESULT} \|", line):
            found[re.findall(r"`(.*?)`", match[1])[0]] = match.groups()[1:]
    found["2026-08-30_ANVIL2 --canonical_mask off"] = found.pop("--canonical_mask off")
    for name, (minutes, mean, deviation, runs) in found.items():
        known = published()[name]
        assert (float(minutes), float(mean)) == (known["minutes"], known["mean"]), name
        assert int(runs or 1) == known["runs"], name
        assert deviation is None or float(deviation) == known["deviation"], name
    assert found.keys() == published().keys() - {"muon", "adamw"}

    for line in BENCHMARKS.splitlines():
        if match := re.match(rf"\| (\S+) \| {SAME} \|", line):
            (name,) = (name for name in published() if re.fullmatch(rf"{match[1]}([_-]\w+)?", name))
            for key in ("mean", "deviation", "runs", "minutes"):
                assert match[key] is None or float(match[key]) == published()[name][key], name
            found.pop(name)
    assert [*found] == ["2026-08-30_ANVIL2 --canonical_mask off"]


def test_memory_in_benchmarks_is_that_of_which_runs_are_told():
    """Also in the table of launches, in whose cells it is the third number."""
    lines = [[cell.strip() for cell in line.split("|")] for line in BENCHMARKS.splitlines()]
    (start,) = (i for i, cells in enumerate(lines) if cells[1:3] == ["card", "2024-11-24"])
    titles, _, large, small = (cells[2:-1] for cells in lines[start : start + 4])
    found = {}
    for name, known in machine.counted().items():
        for flags, row in known.items():
            title = name if name.startswith("medium") else name[:10]
            title += ", `{} {}`".format(*flags.split()[:2]) if flags else ""
            found[title] = [str(row.get(card, "")) for card in ("large", "small")]
    for title, *cells in zip(titles, large, small, strict=True):
        assert found[title] == cells, title
    for name in ("2025-01-26", "medium_2025-01-18", "medium_2025-12-31"):
        (of_one_h100,) = (cells[3] for cells in lines if len(cells) == 7 and cells[1] == name)
        assert of_one_h100.split(", ")[2] == found[name][0]


def test_the_fork_in_readme_trains_with_its_rule_and_its_activation(flags, tmp_path):
    """In its last step, matrices change by 0.02 of the learning rate, and the loss is that of a GPT
    whose MLP has GELU."""
    (tmp_path / "my_fork.py").write_text(FORK)
    flags = [*flags, "--num_iterations", str(STEPS)]
    saving = ["--save_every", "1", "--keep", "9", "--run_id", "it", "--val_loss_every", "0"]
    launched(["my_fork.py", *flags, *saving], tmp_path)
    before, after = (
        torch.load(tmp_path / f"logs/it/state_step00000{step}.pt", weights_only=True)
        for step in (STEPS - 1, STEPS)
    )
    assert after["script"] == "my_fork.py"

    hp, _ = train_gpt.parse_args(flags, train_gpt.Run)
    now = train_gpt.Moment(STEPS - 1, hp)
    matrices = [n for n in before["model"] if re.fullmatch(r"blocks.*(weight|qkv_w)", n)]
    assert len(matrices) == 4 * hp.num_layers
    for name in matrices:
        change = (after["model"][name] - before["model"][name]).abs()
        wanted = torch.full_like(change, 0.02 * hp.muon_lr * now.lr)
        torch.testing.assert_close(change, wanted, rtol=0, atol=1e-6)

    model = train_gpt.GPT(hp)
    model.load_state_dict(before["model"])
    for block in model.blocks:
        block.mlp.forward = partial(gelu_mlp, block.mlp)
    size = hp.batch_seqs * hp.seq_len
    tokens = train_gpt.load_data_shard(tmp_path / "train_1.bin")[(STEPS - 1) * size :][: size + 1]
    tokens = torch.from_numpy(tokens.astype("int64"))
    inputs, targets = (part.view(-1, hp.seq_len) for part in (tokens[:-1], tokens[1:]))
    with torch.no_grad():
        losses = [model(i, t, now).item() for i, t in zip(inputs, targets, strict=True)]
    trained = rows(tmp_path / "logs/it.jsonl")[-1]["train_loss"]
    assert abs(sum(losses) / len(losses) - trained) < 1e-5


WANDB = """import json
class init:
    def __init__(self, name, config):
        self.file = open(f"{name}_wandb", "w", buffering=1)
    def log(self, row, step):
        print(json.dumps(row | {"step": step}), file=self.file)
"""


@pytest.mark.parametrize(
    ("rates", "status", "steps"),
    [("", 0, 5), ("--embed_lr 0 --head_lr 0 --scalar_lr 0 --muon_lr 0", 143, 4)],
)
def test_the_hooks_in_readme_are_called(rates, status, steps, flags, tmp_path):
    """A loss that falls to the last step, and one that never does, which ends the run early. wandb
    is a stand-in that writes what it gets."""
    (tmp_path / "my_hooks.py").write_text(HOOKS)
    (tmp_path / "wandb.py").write_text(WANDB)
    words = ["my_hooks.py", *flags, "--run_id", "it", "--num_iterations", "5", *rates.split()]
    program = Program([*words, "--val_loss_every", "1", "--save_every", "1"], work=launch_with)
    assert program.end() == [status], program.text("err")
    found = rows(tmp_path / "logs/it.jsonl")
    assert rows(tmp_path / "it_wandb") == found and found[-1]["step"] == steps
    best = torch.load(tmp_path / "logs/it/best.pt", weights_only=True)["step"]
    losses = {row["step"]: row["val_loss"] for row in found if "val_loss" in row}
    assert best == max(step for step in losses if losses[step] == min(losses.values()))
    assert program.text("out").count("sample: ") == len(losses)


def test_the_technique_in_readme_scales_heads_and_learns(tiny, randomize, monkeypatch):
    """The model without the technique has the same logits if the gain of a head scales the head's
    columns of the output projection. Adam's first step has the size of the learning rate."""
    source = (HERE / "train_gpt.py").read_text("utf-8")
    for hunk in re.split(r"^@@.*\n", TECHNIQUE, flags=re.M)[1:]:
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        assert source.count(before) == 1, hunk
        source = source.replace(before, after)
    changed = ModuleType("train_gpt_with_gain")
    changed.__file__ = str(HERE / "train_gpt.py")
    monkeypatch.setitem(sys.modules, changed.__name__, changed)  # dataclasses look for it
    exec(compile(source, changed.__file__, "exec"), vars(changed))

    hp = changed.Hyperparameters(**{**vars(tiny), "head_gain": True, "batch_seqs": 1})
    model = randomize(changed.GPT(hp))
    plain = changed.GPT(replace(hp, head_gain=False))
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    gains = {name: weights.pop(name) for name in list(weights) if name.endswith("attn.gain")}
    assert len(gains) == hp.num_layers
    for name, gain in gains.items():
        weights[name.replace("gain", "c_proj.weight")] *= gain.repeat_interleave(hp.head_dim)
    plain.load_state_dict(weights)
    tokens, now = torch.arange(hp.seq_len) * 7 % hp.vocab_size, train_gpt.Moment(0, hp)
    torch.testing.assert_close(plain.hidden(tokens, now), model.hidden(tokens, now))

    optimizers = changed.Optimizers(model, hp)
    changed.train_step(model, optimizers, tokens[None], tokens[None], now)
    for name, gain in gains.items():
        change = (model.get_parameter(name) - gain).abs()
        torch.testing.assert_close(change, torch.full_like(gain, hp.scalar_lr * now.lr))
