"""The rows of 2025-08-23 (A), 2026-01-19 (C), 2026-01-26 (C5) and 2026-03-06 (D) as whole runs:
ranks, stops, errors, switches, the tools. What they compute is measured against plain float64 in
other files; there is row B, too, which is C without two switches."""

import itertools
import json
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import bench
import hellaswag
import pytest
import sample
import spy
import torch
import watch
from conftest import language
from runs import Program, before_step, console_of, error_of, rows, val_losses

import train_gpt
from train_gpt import load_checkpoint, main, moment, program

A, C = "2025-08-23_SparseAttnGate", "2026-01-19_BigramHashEmbedding"
C5, D = "2026-01-26-UntieValueEmbeddings", "2026-03-06_SimplifyHC"
LAST, CPU = 8, torch.device("cpu")
# Sequences of 128, 256 and 384 tokens by thirds of 7 steps (row C does not round them), then an
# extension of one; head and embedding part at step 6. Windows are narrower than sequences, and last
# another one.
STAGES = "length=1+window=128+targets=1/.5/.25,length=2+window=128+lr=1.52+targets=1/.5,"
STAGES += "length=3+window=256+lr=1.73,length=3+window=256"
LENGTHS = {A: [128] * 8, C: [128] * 3 + [256] * 2 + [384] * 3}
LENGTHS[D] = [128] * 2 + [256] * 3 + [384] * 3
SIZES = f"--num_heads 2 --head_dim 16 --model_dim 32 --num_iterations {LAST} --run_id it --keep 9"
SIZES += " --device cpu --seq_len 128 --val_seq_len 512 --val_tokens 1024 --epochs 0"
LAYERS_OF = {
    C: "short+v1+pair,long+v2,short+backout+pair,none+x1",
    C5: "short+v0+pair,long+v1,short+v2+backout,long+v3",
    D: "short+v0+pair,long+v1,short+backout+pair,none+x1,long+v2+in2",
}
ROW = {A: f"--record {A} --num_layers 4"}
for name, table in LAYERS_OF.items():
    ROW[name] = f"--record {name} --layers {table} --num_layers {table.count(',') + 1}"
    ROW[name] += f" --stages {STAGES} --extension_frac .125 --tied_frac .5 --last_window 384"
    ROW[name] += " --bigram_rows 301"  # an odd number: ranks own unequal shares
# On the made-up language no token begins a document. Adam's epsilon is that at which rounding
# noise stays noise, with gradients of a sequence's sum.
WORDS = f"{SIZES} --vocab_size 512 --align_to_documents off --adam_eps 2e-4 --batch_seqs 8"
WORDS += " --save_every 2 --val_loss_every 2"
END = 63  # begins a document, where tokens are 64
checkpoint = "logs/it/state_step{:06}.pt".format
both = pytest.mark.parametrize("record", [A, D])


def outcome(folder: Path, last: int = LAST) -> SimpleNamespace:
    """The last weights and optimizer state as bytes, and the rows of the .jsonl, but for times."""
    saved, times = load_checkpoint(folder / checkpoint(last)), {"ms", "tokens_per_s", "memory_mib"}
    metrics = [{k: row[k] for k in row.keys() - times} for row in rows(folder / "logs/it.jsonl")]
    state = {f"{n} {key}": v for n, of in saved["optimizers"].items() for key, v in of.items()}
    tensors = {name: t.numpy().tobytes() for name, t in (saved["model"] | state).items()}
    return SimpleNamespace(folder=folder, tensors=tensors, rows=metrics)


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> dict[str, list[str]]:
    words = [*language(tmp_path_factory.mktemp("data")), *WORDS.split()]
    return {record: [*words, *row.split()] for record, row in ROW.items()}


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory) -> dict[str, SimpleNamespace]:
    """A run of each row on one rank that nothing disturbed."""
    found = {}
    for record in (A, C, D):
        losses = val_losses(console_of(flags[record], folder := tmp_path_factory.mktemp("whole")))
        found[record] = SimpleNamespace(losses=losses, **vars(outcome(folder)))
    return found


def random_checkpoint(record: str, randomize) -> None:
    """Make it.pt: random weights, with GPT-2's vocabulary."""
    hp, _ = train_gpt.parse_args(f"{ROW[record]} {SIZES}".split())
    state = {"record": record, "hyperparameters": vars(hp), "step": LAST, "run_id": ""}
    state["model"] = randomize(train_gpt.GPT(hp)).state_dict()
    program.save_whole(Path("it.pt"), state)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("record", "ranks"), [(A, 2), (C, 2), (D, 8)])
def test_ranks_agree_across_stages_and_the_split_of_the_head(record, ranks, flags, whole, tmp_path):
    run = Program(flags[record], ranks, spy.main)
    assert run.end() == [0] * ranks, run.text("err")
    found, expected = outcome(tmp_path), whole[record]
    for row, alone in zip(found.rows, expected.rows, strict=True):
        for name in row.keys() & {"train_loss", "val_loss"}:
            assert row[name] == pytest.approx(alone[name], abs=1e-4)
    seen = [json.loads(Path(f"rank{rank}.json").read_text()) for rank in range(ranks)]
    assert len({report["weights"] for report in seen}) == 1  # on all ranks, bit for bit
    moments = [(row["seq_len"], row["tied"]) for row in expected.rows[1:]]
    tied = [False] * 8 if record == A else [True] * 6 + [False] * 2
    assert moments == list(zip(LENGTHS[record], tied, strict=True))


def assert_same(found: SimpleNamespace, expected: SimpleNamespace, since: int = -1) -> None:
    assert not [k for k, v in expected.tensors.items() if found.tensors[k] != v]
    assert found.rows == [row for row in expected.rows if row["step"] > since]


RESUMED = [(A, 0), (A, 4), (C, 4), (D, 0), (D, 2), (D, 4), (D, 6)]


@pytest.mark.parametrize(("record", "step"), RESUMED)
def test_resumed_anywhere_it_ends_as_ever(record, step, flags, whole, tmp_path, monkeypatch):
    """And so it does from the start, without a warm-up."""
    more = ["--resume", whole[record].folder / checkpoint(step)] if step else []
    if not step:
        monkeypatch.setattr(train_gpt, "warm_up", lambda *args, **kwargs: None)
    out = console_of([*flags[record], *more], tmp_path)
    assert (f"\nresumed at step {step}\n" in out) == (step > 0)
    assert_same(outcome(tmp_path), whole[record], since=step or -1)


def stopped(words: list[str], number: int, step: int) -> None:
    before_step(step, lambda: (signal.raise_signal(number), time.sleep(0.3)))  # to notice it
    main(words)


STOPS = [(A, "TERM", 2, 5), (D, "TERM", 2, 6), (D, "KILL", 5, 4)]


@pytest.mark.parametrize(("record", "name", "step", "saved"), STOPS)
def test_a_stopped_run_ends_bit_identical(record, name, step, saved, flags, whole, tmp_path):
    """A signal is seen in the next step, whose result comes one later. Where Adam learns at each
    second step, a run that would end after an odd number of steps makes one more."""
    number, every = signal.Signals[f"SIG{name}"], 2 if name == "KILL" else 0
    run = Program([*flags[record], "--save_every", every], work=stopped, more=(number, step))
    assert run.end() == [-number if name == "KILL" else 128 + number], run.text("err")
    assert max(tmp_path.glob("logs/it/*.pt")) == tmp_path / checkpoint(saved)
    assert name == "KILL" or f"--resume auto goes on after step {saved}\n" in run.text("out")
    console_of([*flags[record], "--resume", "auto"], tmp_path)
    assert_same(outcome(tmp_path), whole[record])


def test_in_the_last_of_an_odd_number_of_steps_only_matrices_learn(flags, tmp_path):
    """The first half of what Adam would take up has no second one. Resumed before it, a run ends
    as ever: warming up leaves no gradient of such a half, either."""
    words = [*flags[C5], "--num_iterations", 7]
    for folder in (tmp_path / "whole", tmp_path / "resumed"):
        folder.mkdir()
        losses = val_losses(console_of(words, folder))
        words += ["--resume", tmp_path / "whole" / checkpoint(6)]
    whole, resumed = (outcome(tmp_path / name, last=7) for name in ("whole", "resumed"))
    assert list(losses) == [7] and losses[7] < whole.rows[0]["val_loss"] - 0.2
    assert_same(resumed, whole, since=6)
    before = outcome(tmp_path / "whole", last=6).tensors
    changed = {key.split()[0] for key, value in whole.tensors.items() if value != before[key]}
    ends = "qkv_w", "c_proj.weight", "c_fc.weight"
    assert changed == {key for key in before if key.endswith(ends)}


BAD = f"""save_every 3;grad_clip 1;adam_every 3;logit_sigmoid 23 5 0
tied_frac .5 --vocab_size 500;key_offset on --rope full;yarn on --stages length=1,length=2
num_layers 6 --layers {train_gpt.records.LAYERS_2026}
layers long,long+backout,long+backout,long
stages foo;stages length=1+widow=2;stages length=two;stages length=0;stages targets=1/1/1/1
stages length=nan;stages length=1/2;stages length=1.5;stages lr=1/2;stages lr=nan
adam_groups heads+lr=1;adam_groups muon+lr=1;adam_groups lr=1;adam_groups head+rate=1
bigram_rows 1;bigram_rows -1;paired_heads on --num_heads 3;gate_by_values on --value_gate off
sublayer_lambdas on --x0_apart off;layers none,long,long,long --sublayer_lambdas on
num_layers 3 --layers long,long,long,long+in1;layers long,long,none+pair,long
layers long,long,none+in0,long;layers long,long,long+in2,long;layers long,long,long+in3,long
adam_groups head+lr=x;adam_groups head+lr=1/2;adam_groups head+lr=-1;adam_groups head+beta1=1.5"""


@pytest.mark.parametrize("words", re.split("[;\n]", BAD))
def test_a_bad_value_ends_with_one_line_that_names_its_flag(words, flags, capsys, monkeypatch):
    monkeypatch.setattr(train_gpt, "train", lambda *arguments: None)
    status, err = error_of([*flags[C], *f"--{words}".split()], capsys)
    assert status == 2 and err.startswith(f"train_gpt.py: error: --{words.split()[0]}")


LAYERS = "long+v0,short,short+x1,long+v2+x0"
# What is on, and behind a bar what makes it matter.
PAIRS = "long+v0+pair,short+pair,short+x1,long+v2+x0+pair"
SWITCHES = f"""yarn on | stages window=128+lr=1,window=256+lr=.5
exact_stages on | stages window=128+lr=1,window=256+lr=.5
stages length=1+targets=1/.5,length=2+lr=.5 |; last_window 384 |; extension_frac .25 |
tied_frac .5, head_init .02 |; x0_apart on, adam_groups x0+lr=.2 |; residual_lambda 1.1 |
momentum_cooldown_steps 4 | momentum_warmup_steps 1
key_offset on |; attention_gate on |; value_gate on |; skip_gate on |; smear on |; loss_sum on |
scaled_projections on |; layers {LAYERS}+backout |; logit_sigmoid 23 5 7.5 |; window_rule distance |
paired_heads on | layers {PAIRS}; bigram_rows 301 |; bigram_lambda .5 | bigram_rows 301
sublayer_lambdas on, x0_apart on | x0_apart on, bigram_rows 301; out_init 1 |
gate_by_values on, value_gate on | value_gate on; layers {LAYERS}+in0 |; layers {LAYERS}+in1 |
adam_rule cautious |; adam_every 2 |; muon_beta2 .95 |; muon_decay 1.2 |; polar_express on |"""


def with_flags(hp, text: str):
    """The settings with those of a text: "name value, name value"."""
    words = [f"--{pair.strip()}".split() for pair in text.split(", ") if pair.strip()]
    own = ["--record", "demo_2025-01-26", "--vocab_size", "512"]
    settings = train_gpt.parse_args([*own, *sum(words, [])])[0]
    return replace(hp, **{name[2:]: getattr(settings, name[2:]) for name, *_ in words})


def four_steps(hp) -> tuple[list[float], dict]:
    """The losses of the steps and of a validation after them, and the last weights."""
    words = torch.randint(1, 24, (769,), generator=torch.Generator().manual_seed(0)).cumsum(0) % 512
    model, val = train_gpt.build(hp, CPU), (words[None, :-1].int(), words[None, 1:])
    optimizers, losses = train_gpt.Optimizers(model, hp), []
    for step in range(4):
        size = 2 * moment(step, hp).seq_len
        batch = words[:size].int().view(2, -1), words[1 : size + 1].view(2, -1)
        losses.append(train_gpt.train_step(model, optimizers, *batch, step)[0].item())
    return [*losses, train_gpt.evaluate(model, val, moment(4, hp), CPU)], model.state_dict()


@pytest.mark.parametrize("text", re.split("[;\n] *", SWITCHES), ids=lambda text: text.split()[0])
def test_each_switch_trains_and_matters_and_off_is_the_model_without_it(text, tiny):
    on, more = text.split("|")
    plain = with_flags(replace(tiny, batch_seqs=2, layers=LAYERS), more)
    train_gpt.check(hp := with_flags(plain, on))
    (losses, weights), (expected, same) = four_steps(hp), four_steps(plain)
    assert max(losses) < 7 and min(losses[3:]) < losses[0] - 0.02 and losses != expected
    off = {pair.split()[0]: getattr(plain, pair.split()[0]) for pair in on.split(", ")}
    losses, weights = four_steps(replace(hp, **off))
    assert losses == expected and weights.keys() == same.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in same.items())


@pytest.mark.parametrize("text", [f"layers {PAIRS}", "bigram_lambda .5"])
def test_what_waits_for_a_switch_changes_nothing_without_it(text, tiny):
    plain = replace(tiny, batch_seqs=2, layers=LAYERS)
    (losses, weights), (expected, same) = four_steps(with_flags(plain, text)), four_steps(plain)
    assert losses == expected and weights.keys() == same.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in same.items())


def test_the_last_of_several_targets_falls_to_0_within_its_stage(tiny):
    hp = replace(tiny, stages="targets=1/.5,targets=1/.5", num_iterations=50)
    found = [moment(step, hp).targets[1] for step in range(50)]
    assert found == pytest.approx([0.5 - step % 25 / 50 for step in range(50)])


@pytest.fixture(params=[C, D])
def model(request, flags, randomize, monkeypatch) -> train_gpt.GPT:
    """A row's model with random weights and four heads; its last token begins a document."""
    for module in (train_gpt, hellaswag):
        monkeypatch.setattr(module, "END_OF_TEXT", END)
    more = "--vocab_size 64 --tied_frac 0 --num_heads 4 --head_dim 8"
    hp, _ = train_gpt.parse_args([*flags[request.param], *more.split()])
    return randomize(train_gpt.GPT(hp)).eval()


@torch.inference_mode()
def test_sampling_with_a_cache_gives_the_logits_without_it(model):
    """In chunks and one by one, until blocks have left the memory. A bigram has another row at the
    second place than further on."""
    when = moment(LAST, replace(model.hp, last_window=256))
    tokens = torch.randint(END, (640,), generator=torch.Generator().manual_seed(0)).tolist()
    tokens[40] = tokens[41] = tokens[130] = END
    decoder, place = sample.Decoder(model, when), 0
    for size in [1, 1, 1, 47, 1, 99, *[1] * 300, 120, *[1] * 70]:
        place += size
        found = decoder(tokens[place - size : place])
        if size > 1 or place < 4 or place % 15 == 0:
            expected = sample.Rereader(model, when)(tokens[:place])
            assert torch.allclose(found, expected, rtol=0, atol=2e-4), place
    assert len(decoder.recent) < place == 640


@torch.inference_mode()
def test_a_prompt_is_read_as_its_tokens_are_one_by_one(model):
    tokens = torch.randint(END, (140,), generator=torch.Generator().manual_seed(1)).tolist()
    decoder = sample.Decoder(model, moment(LAST, model.hp))
    for token in tokens:
        found = decoder([token])
    for size in (0, 1, 2):  # of a part that is read before the rest
        decoder = sample.Decoder(model, moment(LAST, model.hp))
        for part in (tokens[:size], tokens[size:]) if size else (tokens,):
            logits = decoder(part)
        assert torch.allclose(logits, found, rtol=0, atol=2e-4)


def test_text_is_the_same_with_and_without_a_cache(randomize, capsys):
    random_checkpoint(D, randomize)
    for more in ("", " --no_cache"):
        words = f"--n 1 --tokens 150 --seed 1{more} --prompt".split()
        sample.main(["it.pt", *words, "a b c " * 50])
    text = capsys.readouterr().out
    assert text[: len(text) // 2] == text[len(text) // 2 :] and len(set(text)) > 30


def behind(model, before: list[int], document: list[int]) -> torch.Tensor:
    """The logarithms of chances (n, 64) after each token of a document that is behind others."""
    tokens = [*before, *document]
    blocks = torch.tensor(tokens + [0] * (-len(tokens) % 128))
    now = replace(model.at(1024), short=1024)  # paired heads have two positions a token
    return model.logits(blocks, now).log_softmax(1)[len(before) : len(tokens), :64]


@torch.no_grad()
def test_packed_documents_have_the_scores_that_they_have_alone(model):
    """Behind three ends of text, of which the last is equal everywhere."""
    generator, pairs, expected = torch.Generator().manual_seed(0), [], []
    for i, size in enumerate((70, 200, 33, 150, 90, 370)):
        tokens = [END, *torch.randint(END, (size,), generator=generator).tolist()]
        pairs.append((tokens, start := 1 + 9 * i))
        chances = behind(model, [END] * 3, tokens[:-1])[start - 1 :]
        expected.append(chances[range(len(chances)), tokens[start:]].double().sum().item())
    for parts in ([[pair] for pair in pairs], [pairs]):  # alone, and packed
        packed = [zip(*part, strict=True) for part in parts]
        found = torch.cat([hellaswag.log_likelihoods(model, *p, 256) for p in packed])
        assert found.tolist() == pytest.approx(expected, abs=5e-4)


@torch.no_grad()
@pytest.mark.parametrize("ends", [2, 3])
def test_it_takes_three_ends_of_text_to_be_the_same_behind_any_neighbour(ends, model):
    """The second token of a sequence has another bigram than the same two tokens elsewhere have,
    and the next token's key takes something from it."""
    document, neighbour = [END, *range(40)], [END, *range(62, 30, -1)]
    alone = behind(model, [END] * ends, document)
    error = (behind(model, neighbour + [END] * ends, document) - alone).abs().max().item()
    assert error < 1e-4 if ends == 3 else error > 0.01


def test_diff_list_and_help_show_all_rows(capsys):
    main(["--diff", D, A])
    table = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines()[1:])
    assert table["yarn"].split() == table["sublayer_lambdas"].split() == ["on", "off"]
    assert table["bigram_rows"].split() == ["251520", "0"] and "attention_gate" not in table
    main(["--list_records"])
    assert capsys.readouterr().out.splitlines()[0].split() == list(train_gpt.RECORDS)
    pytest.raises(SystemExit, main, ["--help"])
    words = set(re.split("[{},\\s]+", capsys.readouterr().out))
    assert {A, C, C5, D, "--yarn", "--paired_heads", "--bigram_rows"} < words


@both
def test_a_finished_run_is_evaluated_and_drawn(record, whole, capsys):
    losses, folder = whole[record].losses, whole[record].folder
    for step in (2, 6, LAST):
        main(words := ["--eval", str(folder / checkpoint(step)), "--device", "cpu"])
        assert f"val_loss:{losses[step]:.4f} over 1024 tokens" in capsys.readouterr().out
    run = train_gpt.Run(*train_gpt.parse_args(words), None)
    moments = [moment(step, run.hp) for step in (LAST, LAST - 1)]
    last, before = (train_gpt.evaluate(run.model, run.val_batch, now, CPU) for now in moments)
    assert last == whole[record].rows[-1]["val_loss"]
    assert (last == before) == (record == A)  # D's last validation has another window
    watch.main([str(folder / "logs/it.txt")])
    text = " ".join(capsys.readouterr().out.split())
    said = record, "finished", "⠤", f"val loss {losses[LAST]:.4f} at step 8"
    assert all(words in text for words in said)


@both
def test_bench_counts_the_tokens_of_each_stage(record, flags, monkeypatch, capsys):
    monkeypatch.setattr(bench, "matmul_tflops", lambda *_: 0.05)
    bench.main(["--json", "--steps", "5", "--micro_batches", "1", *flags[record]])
    found = json.loads(capsys.readouterr().out)["windows"]
    for step, row in zip((0, 4, 7), found, strict=True):
        length = LENGTHS[record][step]
        assert row["step"] == step and row["attention_tflop"] > 0
        assert row["tokens_per_s"] == pytest.approx(1e3 * length / row["ms_per_step"])


@torch.no_grad()
def test_bench_counts_pairs_of_a_query_and_a_key_under_each_layers_window(model):
    """One by one. Paired heads are half as many, and see twice as many positions; each has
    12 * head_dim operations, forward and backward."""
    tokens = torch.randint(END, (2, 384), generator=torch.Generator().manual_seed(0)).int()
    tokens[0, [70, 71, 300]] = END
    expected = 0
    for row, layer in itertools.product(tokens.tolist(), model.layers):
        places, window = 1 + layer.paired, {"long": 256, "short": 128}.get(layer.window)
        start = 0
        for i in range(len(row) * places if window else 0):
            if i % places == 0 and row[i // places] == END:
                start = i
            expected += (i - max(start, i - window) + 1) * 4 // places * 12 * 8
    assert bench.model_flops(model, tokens, 256)[1] == expected


NAMES = {A: "attention_gate", D: "yarn smear backout paired source bigram_rows sublayer_lambdas"}


@pytest.mark.parametrize(("record", "names"), NAMES.items())
def test_export_refuses_with_the_names_of_what_it_does_not_know(record, names, randomize, capsys):
    export = pytest.importorskip("export")
    random_checkpoint(record, randomize)
    status, err = error_of(["it.pt", "--export", "hf", "hf"], capsys, export.main)
    assert status in (1, 2) and all(name in err for name in ["does not know", *names.split()])
    assert not Path("hf").exists() and not Path("hf.tmp").exists()
