"""The tools on the frontier's models: sampling, HellaSwag, the view of a run, speed, export."""

import itertools
import json
from pathlib import Path

import bench
import hellaswag
import pytest
import sample
import torch
import watch
from runs import error_of
from train_gpt_2026 import GPT, Moment, Run

import train_gpt
from frontier.small_runs import LAST, ROW, SIZES, C, D

END = 63  # begins a document, where tokens are 64


def random_checkpoint(record: str, randomize) -> None:
    """Make it.pt: random weights, with GPT-2's vocabulary."""
    hp, _ = train_gpt.parse_args(f"{ROW[record]} {SIZES}".split(), Run)
    state = {
        "script": "train_gpt_2026.py",
        "record": record,
        "hyperparameters": dict(vars(hp)),
        "step": LAST,
        "model": randomize(GPT(hp)).state_dict(),
    }
    torch.save(state, "it.pt")


@pytest.fixture(params=[C, D])
def model(request, flags, randomize, monkeypatch) -> GPT:
    """Return a row's model with random weights and four heads; its last token begins a document."""
    for module in (train_gpt, hellaswag):
        monkeypatch.setattr(module, "END_OF_TEXT", END)
    more = "--vocab_size 64 --tied_frac 0 --num_heads 4 --head_dim 8"
    hp, _ = train_gpt.parse_args([*flags[request.param], *more.split()], Run)
    return randomize(GPT(hp)).eval()


def at_windows(model: GPT, window: int, short: int) -> Moment:
    """Return the moment after training with these windows."""
    now = Moment(LAST, model.hp)
    now.window, now.short = window, short
    return now


# -----------------------------------------------------------------------------
# Sampling


@torch.inference_mode()
def test_sampling_with_a_cache_gives_the_logits_without_it(model):
    """In chunks and one by one, until blocks have left the memory. A bigram has another row at the
    second place than further on."""
    now = at_windows(model, 256, 128)
    tokens = torch.randint(END, (640,), generator=torch.Generator().manual_seed(0)).tolist()
    tokens[40] = tokens[41] = tokens[130] = END
    decoder, place = sample.Decoder(model, now), 0
    for size in [1, 1, 1, 47, 1, 99, *[1] * 300, 120, *[1] * 70]:
        place += size
        found = decoder(tokens[place - size : place])
        if size > 1 or place < 4 or place % 15 == 0:
            expected = sample.Rereader(model, now)(tokens[:place])
            assert torch.allclose(found, expected, rtol=0, atol=2e-4), place
    assert len(decoder.recent) < place == 640


def test_text_is_the_same_with_and_without_a_cache(randomize, capsys):
    """The checkpoint names the script, which is found."""
    random_checkpoint(D, randomize)
    for more in ("", " --no_cache"):
        words = f"--n 1 --tokens 80 --seed 1{more} --prompt".split()
        sample.main(["it.pt", *words, "a b c " * 30])
    text = capsys.readouterr().out
    assert text[: len(text) // 2] == text[len(text) // 2 :] and len(set(text)) > 30


# -----------------------------------------------------------------------------
# Scores


def behind(model, before: list[int], document: list[int]) -> torch.Tensor:
    """Return the logarithms of chances (n, 64) after each token of a document that is behind
    others."""
    tokens = [*before, *document]
    blocks = torch.tensor(tokens + [0] * (-len(tokens) % 128))
    # Paired heads have two positions a token.
    now = at_windows(model, 1024, 1024)
    logits = model.lm_head.logits(model.hidden(blocks, now))
    return logits.log_softmax(1)[len(before) : len(tokens), :64]


@torch.no_grad()
def test_packed_documents_have_the_scores_that_they_have_alone(model):
    """Behind three ends of text, of which the last is equal everywhere."""
    generator, pairs, expected = torch.Generator().manual_seed(0), [], []
    for i, size in enumerate((70, 200, 33, 150, 90, 370)):
        tokens = [END, *torch.randint(END, (size,), generator=generator).tolist()]
        start = 1 + 9 * i
        pairs.append((tokens, start))
        chances = behind(model, [END] * 3, tokens[:-1])[start - 1 :]
        expected.append(chances[range(len(chances)), tokens[start:]].double().sum().item())
    now = Moment(LAST, model.hp)
    for parts in ([[pair] for pair in pairs], [pairs]):  # alone, and packed
        packed = [zip(*part, strict=True) for part in parts]
        found = torch.cat([hellaswag.log_likelihoods(model, *p, now) for p in packed])
        assert found.tolist() == pytest.approx(expected, abs=5e-4)


@torch.no_grad()
@pytest.mark.parametrize("ends", [2, 3])
def test_it_takes_three_ends_of_text_to_be_the_same_behind_any_neighbour(ends, model):
    """The second token of a sequence has another bigram than the same two tokens elsewhere have,
    and the next token's key takes something from it."""
    assert model.context_tokens == 3
    document, neighbour = [END, *range(40)], [END, *range(62, 30, -1)]
    alone = behind(model, [END] * ends, document)
    error = (behind(model, neighbour + [END] * ends, document) - alone).abs().max().item()
    assert error < 1e-4 if ends == 3 else error > 0.01


# -----------------------------------------------------------------------------
# Views of runs, speed, export


def test_a_finished_run_is_drawn(whole, capsys):
    watch.main([str(whole(D).folder / "logs/it.txt")])
    text = " ".join(capsys.readouterr().out.split())
    said = D, "finished", "⠤", f"val loss {whole(D).losses[LAST]:.4f} at step 8"
    assert all(words in text for words in said)


def test_bench_counts_the_tokens_of_each_stage(flags, monkeypatch, capsys):
    monkeypatch.setattr(bench, "matmul_tflops", lambda *_: 0.05)
    words = ["--json", "--steps", "5", *flags[D], "--batch_seqs", "1"]
    bench.main(["train_gpt_2026.py", *words])
    report = json.loads(capsys.readouterr().out)
    run = report["runs"][0]
    assert run["script"] == "forks/train_gpt_2026.py" and run["record"] == D
    for step, length, row in zip((0, 4, 7), (128, 256, 384), report["windows"], strict=True):
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
        if layer.window == "none":
            continue
        places = 2 if layer.paired else 1
        window = 256 if layer.window == "long" else 128
        start = 0
        for i in range(len(row) * places):
            if i % places == 0 and row[i // places] == END:
                start = i
            expected += (i - max(start, i - window) + 1) * 4 // places * 12 * 8
    now = at_windows(model, 256, 128)
    assert bench.model_flops(Run, model, tokens, now)[1] == expected


def test_export_refuses_with_the_names_of_what_it_does_not_know(randomize, capsys):
    export = pytest.importorskip("export")
    random_checkpoint(D, randomize)
    status, err = error_of(["it.pt", "--export", "hf", "hf"], capsys, export.main)
    names = ["yarn", "smear", "backout", "paired", "source", "bigram_rows", "sublayer_lambdas"]
    assert status in (1, 2) and all(name in err for name in ["does not know", *names])
    assert not Path("hf").exists() and not Path("hf.tmp").exists()
