"""What only a GPU can show. Run with `./run.sh test gpu`; figures go to BENCHMARKS.md."""

import gc
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

import bench
import test_loss
import train_gpt
import train_gpt_2026 as fork
import train_gpt_2026_08 as newest
import train_gpt_track3 as track3
from conftest import at_window
from reference import relative_error
from runs import val_losses
from sample import Decoder
from train_gpt import HERE, RECORDS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
RECORD, RECORD_2024 = RECORDS["2025-01-26_BatchSize"], RECORDS["2024-11-24_WindowWarmup"]
E, UP = (
    newest.RECORDS[name] for name in ("2026-07-17_FP8DownProjection", "2026-05-27-MuddGatedAndDC")
)
F92 = replace(newest.RECORDS["2026-08-30_ANVIL2"], ngram_rows=1234)
A, *_, D = (fork.RECORDS[name] for name in list(fork.RECORDS)[:5])


@pytest.fixture(autouse=True)
def begun():
    """Begin each test with what `build` sets for compiled code, and with nothing compiled: torch
    counts recompilations over all tests. A test says itself whether @compiled compiles. A run of an
    earlier test has frozen its model, which would keep 2 GB of a card's memory, and compilation has
    locked gigabytes of the host's."""
    torch._dynamo.reset()
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()
    train_gpt.build(train_gpt.Run, RECORDS["demo"], torch.device("cuda"))
    train_gpt.compilation.allowed = False


def needs_fp8():
    if not train_gpt.fp8_supported(torch.device("cuda")):
        pytest.skip("this GPU has no FP8 matmul (it needs compute capability 8.9)")


def documents(length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50256, (length,), generator=generator, dtype=torch.int32)
    tokens[torch.randint(0, length, (length // 300,), generator=generator)] = 50256
    tokens[0] = 50256
    return tokens


@pytest.mark.parametrize("rule", ["blocks", "tokens", "distance"])
@pytest.mark.parametrize("window", [128, 896, 1792])
def test_flex_attention_equals_sdpa_with_gradients(window, rule):
    """Compiled in bfloat16, and in float64 under the dense mask. By distance with keys of the token
    before."""

    def attend(q, k, v, mask, scale):
        k = newest.offset_keys(k) if rule == "distance" else k
        return train_gpt.attend(q, k, v, mask, scale)

    first = fork.first_visible(documents(4096) == 50256, torch.tensor(window), rule).cuda()
    drawn = torch.randn(4, 1, 6, 4096, 128, dtype=torch.bfloat16, device="cuda")
    results = []
    for function, dtype, mask in (
        (torch.compile(attend, dynamic=False), torch.bfloat16, train_gpt.block_lists(first)),
        (attend, torch.float64, train_gpt.make_mask(first)),
    ):
        *qkv, grad = drawn.to(dtype)
        qkv = [part.clone().requires_grad_() for part in qkv]
        out = function(*qkv, mask, 0.12)
        results.append([out, *torch.autograd.grad(out, qkv, grad)])
    for found, expected in zip(*results, strict=True):
        assert relative_error(found, expected) < 0.02


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("script", [train_gpt, fork])
def test_compiled_head_and_loss_equal_float64(script, fp8, monkeypatch):
    """Two chunks, so that the second adds to the first. The fork's loss has three targets."""
    if fp8:
        needs_fp8()
    cap, shares, divisor = {"logit_softcap": 15.0}, (1.0,), 1024
    hp = replace(RECORD, fp8=fp8)
    if script is fork:
        cap, shares, divisor = {"logit_sigmoid": (23.0, 5.0, 7.5)}, (1.0, 0.5, 0.25), 1
        hp = replace(D, fp8=fp8, tied_frac=0.0)
    monkeypatch.setattr(script.Head, "chunk_len", lambda self, device: 512)
    head = script.Head(hp).cuda()
    head.weight.data.normal_(0, 0.05)
    x = torch.randn(1024, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 50257, (1024,), device="cuda")
    monkeypatch.setattr(train_gpt.compilation, "allowed", True)
    loss = test_loss.loss_of(head, x, targets, shares)
    loss.backward()
    value, grad_x, grad_w = test_loss.objective(x, head.weight, targets, cap, shares)
    tolerance = 0.07 if fp8 else 0.02
    assert loss.item() == pytest.approx(value, rel=2e-3)
    assert relative_error(x.grad, grad_x / divisor) < tolerance
    assert relative_error(head.weight.grad, grad_w / divisor) < tolerance


def moment_of(script, hp, tied: bool = False):
    """Return a moment with a long window of 384 tokens; of the fork with a short one of 128."""
    if script not in (fork, newest):
        return at_window(384, hp)
    now = script.Moment(0 if tied else hp.num_iterations, hp)
    now.window, now.short = 384, 128
    return now


def placed(model: train_gpt.GPT, device: torch.device) -> train_gpt.GPT:
    """Move a model to a device, with the dtypes that it has there, and return it."""
    model.to(device)
    for table in model.tables():
        table.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    return model


@pytest.mark.parametrize(
    ("script", "record", "tied"),
    [
        (train_gpt, RECORD, False),
        (train_gpt, RECORD_2024, False),
        (fork, A, False),
        (fork, D, False),
        (fork, D, True),
        (newest, E, True),
        (track3, track3.RECORDS["muon"], False),
        (track3, track3.RECORDS["adamw"], False),
    ],
)
def test_the_model_on_cuda_equals_the_model_on_a_cpu(script, record, tied, randomize):
    """Compiled in bfloat16, and in float32. Also where the head is the embedding, with several
    targets."""
    hp = replace(record, model_dim=256, num_heads=2, fp8=False)
    tokens = documents(2049 if script is track3 else 1025)  # two contexts
    results = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        model = placed(randomize(script.GPT(hp)), device)
        train_gpt.compilation.allowed = device.type == "cuda"
        inputs, targets = tokens[:-1].to(device), tokens[1:].long().to(device)
        loss = model(inputs, targets, moment_of(script, hp, tied))
        loss.backward()
        learned = {n: p for n, p in model.named_parameters() if p.grad is not None}
        grads = {n: p.grad.to_dense() for n, p in learned.items() if p.ndim >= 2}
        results.append((loss.item(), grads))
    (cpu_loss, cpu_grads), (cuda_loss, cuda_grads) = results
    assert cuda_loss == pytest.approx(cpu_loss, rel=1e-2)
    for name, grad in cpu_grads.items():
        assert relative_error(cuda_grads[name], grad) < 0.1, name


@pytest.mark.parametrize(
    ("script", "record", "shift"),
    [(train_gpt, RECORD, 15.0), (train_gpt, RECORD_2024, 30.0), (fork, D, 11.5), (newest, E, 11.5)],
)
@torch.no_grad()
def test_cached_logits_are_the_uncached_ones(script, record, shift, randomize):
    """In bfloat16. Softmax does not see `shift`, in which the logits' numbers would drown."""
    hp = replace(record, model_dim=256, num_heads=2)
    model, now = (
        placed(randomize(script.GPT(hp)).eval(), torch.device("cuda")),
        moment_of(script, hp),
    )
    tokens = documents(640).tolist()  # whole blocks
    expected = model.lm_head.logits(model.hidden(torch.tensor(tokens, device="cuda").int(), now))
    decoder = Decoder(model, now)
    found = [decoder(tokens[:590]), *(decoder([token]) for token in tokens[590:600])]
    assert relative_error(torch.stack(found) - shift, expected[589:600] - shift) < 0.03


@pytest.mark.parametrize("run", [train_gpt.Run, fork.Run])
def test_a_step_after_warm_up_neither_synchronises_nor_compiles(run):
    """All windows or stages of a run on four layers of full width, and a validation."""
    sizes = {"num_layers": 4, "seq_len": 4096, "val_seq_len": 8192, "num_iterations": 28}
    hp = replace(RECORD, **sizes)
    if run is fork.Run:
        layers = "short+v1+pair,long+v2,short+backout+pair,long+v1+x1+in2"
        hp = replace(D, **sizes | {"seq_len": 2048, "layers": layers})
    device = torch.device("cuda")
    model = train_gpt.build(run, hp, device)
    optimizers = run.Optimizers(model, hp)
    moments = [run.Moment(step, hp) for step in range(hp.num_iterations + 1)]
    train_gpt.gpu_kernels.choose_kernels(model, hp, device, train_gpt.all_reduce_)
    run.warm_up(model, optimizers, moments, device)
    tokens = documents(8193).to(device)

    def step_of(now) -> None:
        inputs, targets = tokens[None, : now.seq_len], tokens[None, 1 : now.seq_len + 1].long()
        train_gpt.train_step(model, optimizers, inputs, targets, now)

    for now in moments[:2]:  # they make the optimizers' state
        step_of(now)
    graphs = counters["stats"]["unique_graphs"]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for now in moments[:-1]:
            step_of(now)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    batch = [tokens[None, :-1], tokens[None, 1:].long()]
    train_gpt.evaluate(model, batch, moments[-1], device)
    assert counters["stats"]["unique_graphs"] == graphs


def test_gradients_of_tables_have_the_same_bits_each_time():
    """Of 49152 tokens, a third of them one token."""
    table = torch.randn(50257, 768, device="cuda", dtype=torch.bfloat16).requires_grad_()
    tokens = (torch.randint(0, 12000, (49152,), device="cuda") - 4000).clamp(min=0).int()
    grad = torch.randn(49152, 768, device="cuda", dtype=torch.bfloat16)
    found = [
        torch.autograd.grad(train_gpt.look_up(tokens, table), table, [grad])[0] for _ in range(5)
    ]
    assert all(torch.equal(other, found[0]) for other in found)
    expected = torch.zeros(50257, 768, device="cuda", dtype=torch.float64)
    expected.index_add_(0, tokens.long(), grad.double())
    assert relative_error(found[0], expected) < 5e-3


def test_bench_counts_launches_of_torch_and_of_triton_but_no_copies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for the trace
    x, host = torch.zeros(1000, device="cuda"), torch.zeros(1000)
    compiled = torch.compile(lambda x: x.sin() + 1)
    compiled(x)

    def step(_):
        for _ in range(7):
            x.add_(1)
        for _ in range(3):
            compiled(x)
        x.copy_(host)

    run = SimpleNamespace(device=x.device, steps=(0, 0, 0), step=step)
    assert bench.trace_steps(run, 2)["launches"] == 10


KERNELS = [(train_gpt, RECORD), (fork, A), (fork, D), (newest, E), (newest, UP), (newest, F92)]


@pytest.mark.parametrize(("script", "record"), KERNELS)
def test_all_kernels_are_found_right_for_the_record(script, record, monkeypatch):
    """A run's own comparison finds that, compiled. Two choices by their times are equal. Run with
    -s for the times."""
    if script is newest:
        needs_fp8()
    kernels, chosen = pytest.importorskip("gpu_kernels"), []
    device = torch.device("cuda")
    model = script.GPT(record).to(device)
    monkeypatch.setattr(train_gpt.compilation, "allowed", True)
    for _ in range(2):
        lines = []
        kernels.choose_kernels(model, record, device, train_gpt.all_reduce_, lines.append)
        print("\n".join(lines))
        chosen.append(sorted(kernels.IN_USE))
        assert len(re.findall(r"^kernel \w+: .* ms$", "\n".join(lines), re.M)) == len(model.kernels)
    assert chosen[0] == chosen[1]
    monkeypatch.setattr(kernels.triton.testing, "do_bench", lambda call: 0.0)
    kernels.choose_kernels(model, record, device, train_gpt.all_reduce_, print)
    assert sorted(kernels.IN_USE) == sorted(model.kernels)


SHORT_VALIDATION = "--val_seq_len 65536 --val_tokens 65536"


@pytest.fixture
def on_the_sample(capsys, monkeypatch, tmp_path, write_shard):
    """Return train(run, flags): it trains on the sample, of which 262144 tokens are for validation,
    and returns what is printed."""
    end, files = train_gpt.RECORDS["demo"].end_of_text, ("val_000000", "train_000001")
    shards = [train_gpt.load_data_shard(f"{HERE}/data/kjv_{name}.bin") for name in files]
    # Its tokens are GPT-2's first ones; in the records, another token begins a document.
    val, train_ = (np.where(tokens == end, 50256, tokens) for tokens in shards)
    val = write_shard("val_0.bin", np.tile(val, 4)[:262146])
    train_ = write_shard("train_1.bin", train_)
    monkeypatch.chdir(tmp_path)

    def train(run, flags: str) -> str:
        files = f"--train_files {train_} --val_files {val} --epochs 0 --keep 0"
        train_gpt.main(f"{files} {flags}".split(), run)
        text = capsys.readouterr().out
        with capsys.disabled():
            print(f"\n{text}")
        return text

    return train


ALL = [(script, name) for script in (train_gpt, fork, newest) for name in script.RECORDS]
# Record 92, whose table needs several cards, is not among them.
ALL = [case for case in ALL if "demo" not in case[1] and "ANVIL" not in case[1]]


@pytest.mark.parametrize(("script", "name"), ALL)
def test_fifty_steps_of_each_record_on_the_sample(script, name, on_the_sample):
    """Its loss falls; 2025-01-26 takes the memory of a 40 GB card, validation on 262144 tokens
    included: cards of 24 GB take smaller chunks of the loss."""
    validation = "--val_tokens 262144" if script is train_gpt else SHORT_VALIDATION
    flags = f"--record {name} --num_iterations 50 --val_loss_every 25 {validation}"
    text = on_the_sample(script.Run, flags)
    losses = list(val_losses(text).values())
    tied = getattr(script.RECORDS[name], "tied_frac", 0) > 0  # then the head does not begin at zero
    assert losses[0] == pytest.approx(10.8258, abs=0.015 if tied else 1e-3)
    assert losses[-1] < losses[1] < (9 if tied else 6.5)
    if name == "2025-01-26_BatchSize":
        found = re.search(r"allocated: (\d+) MiB reserved: (\d+)", text)
        allocated, reserved = (int(mib) << 20 for mib in found.groups())
        assert allocated < 29e9 and reserved < 32e9


@pytest.mark.parametrize("name", sorted(track3.catalog.RESULTS))
def test_twenty_steps_of_the_optimizer_benchmark_on_the_sample(name, on_the_sample):
    """Of `muonh` and `psgd`, the head does not begin at zero."""
    flags = f"--record {name} --num_iterations 20 --val_loss_every 10 {SHORT_VALIDATION}"
    losses = list(val_losses(on_the_sample(track3.Run, flags)).values())
    random_head = track3.RECORDS[name].init in ("normal", "psgd")
    assert losses[0] == pytest.approx(10.8258, abs=0.3 if random_head else 1e-3)
    assert losses[-1] < losses[1] < 10


def test_fifty_steps_with_all_kernels_give_the_losses_without_any(on_the_sample):
    """Within bfloat16's rounding, with an epsilon that does not turn such noise into steps."""
    found = []
    for choice in ("off", "on"):
        flags = "--num_iterations 50 --val_loss_every 10 --adam_eps 1e-6 --val_tokens 262144"
        text = on_the_sample(train_gpt.Run, f"{flags} --kernels {choice}")
        found.append(val_losses(text))
    plain, fused = found
    assert len(plain) == 6 and fused == pytest.approx(plain, abs=0.02)
