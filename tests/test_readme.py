"""README's fork and README's technique do what README says; its files and flags exist."""

import re
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import train_gpt_2026
import train_gpt_track3
from runs import rows
from test_scripts import launched

import train_gpt
from train_gpt import HERE

README = (HERE / "README.md").read_text("utf-8")
FORK = re.search(r"```python\n(.*?)```", README, re.S)[1]
TECHNIQUE = re.search(r"```diff\n(.*?)```", README, re.S)[1]
STEPS = 4


def gelu_mlp(mlp):
    """Return the MLP as a function of x, with GELU from its definition by the error function."""

    def forward(x):
        h = x @ mlp.c_fc.weight.T
        return (h * (0.5 + 0.5 * torch.erf(h / 2**0.5))) @ mlp.c_proj.weight.T

    return forward


def test_files_and_flags_that_readme_names_exist():
    for path in set(re.findall(r"\b(?:forks|tests|tools)/(?!my_)[\w/]+\.\w+", README)):
        assert (HERE / path).exists(), path
    known = set()
    for script in (train_gpt, train_gpt_2026, train_gpt_track3):
        known |= vars(script.Hyperparameters()).keys()
    for path in (HERE / "train_gpt.py", *HERE.glob("tools/*.py"), *HERE.glob("data/*.py")):
        known |= {*re.findall(r'"--(\w+)', path.read_text("utf-8"))}
    commands = " ".join(re.findall(r"\./run\.sh[^`\n]*", README))
    assert {*re.findall(r"--(\w+)", commands)} <= known


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
        block.mlp.forward = gelu_mlp(block.mlp)
    planned = train_gpt.plan_batches(hp.train_files, hp.seq_len, hp.batch_seqs, STEPS, epochs=0)
    cpu = torch.device("cpu")
    inputs, targets = next(train_gpt.distributed_data_generator(planned, 0, 1, cpu, STEPS - 1))
    with torch.no_grad():
        losses = [model(i, t, now).item() for i, t in zip(inputs, targets, strict=True)]
    trained = rows(tmp_path / "logs/it.jsonl")[-1]["train_loss"]
    assert abs(sum(losses) / len(losses) - trained) < 1e-5


@pytest.fixture(scope="module")
def with_gain() -> ModuleType:
    """Return train_gpt.py as a module, with README's technique added."""
    source = (HERE / "train_gpt.py").read_text("utf-8")
    for hunk in re.split(r"^@@.*\n", TECHNIQUE, flags=re.M)[1:]:
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        assert source.count(before) == 1, hunk
        source = source.replace(before, after)
    module = ModuleType("train_gpt_with_gain")
    module.__file__ = str(HERE / "train_gpt.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)  # dataclasses look for it
        if gpu_kernels := sys.modules.get("gpu_kernels"):
            patch.setattr(gpu_kernels, "PLAIN", {})  # it enters its functions there
        exec(compile(source, module.__file__, "exec"), vars(module))
        yield module


def test_the_gain_of_a_head_scales_its_columns_of_the_output_projection(with_gain, tiny, randomize):
    """So the model without the technique, with such projections, has the same logits."""
    on = with_gain.Hyperparameters(**{**vars(tiny), "head_gain": True})
    model = randomize(with_gain.GPT(on))
    plain = with_gain.GPT(replace(on, head_gain=False))
    weights = model.state_dict()
    gains = [name for name in weights if name.endswith("attn.gain")]
    assert len(gains) == tiny.num_layers
    for name in gains:
        gain = weights.pop(name).flatten()
        output = name.replace("gain", "c_proj.weight")
        weights[output] = weights[output] * gain.repeat_interleave(tiny.head_dim)
    plain.load_state_dict(weights)
    tokens = torch.arange(tiny.seq_len) * 7 % tiny.vocab_size
    now = train_gpt.Moment(0, tiny)
    torch.testing.assert_close(plain.hidden(tokens, now), model.hidden(tokens, now))


def test_the_gains_learn_as_scalars_do(with_gain, tiny, randomize):
    """Adam's first step has the size of the learning rate, whatever the gradient."""
    on = with_gain.Hyperparameters(**{**vars(tiny), "head_gain": True, "batch_seqs": 1})
    model = randomize(with_gain.GPT(on))
    gains = [p for name, p in model.named_parameters() if name.endswith("gain")]
    before = [p.detach().clone() for p in gains]
    tokens = torch.arange(tiny.seq_len)[None] * 7 % tiny.vocab_size
    now = train_gpt.Moment(0, on)
    with_gain.train_step(model, with_gain.Optimizers(model, on), tokens, tokens, now)
    for p, old in zip(gains, before, strict=True):
        wanted = torch.full_like(old, on.scalar_lr * now.lr)
        torch.testing.assert_close((p - old).abs(), wanted)
