"""tokenize_text.py against plain calls of tiktoken, and against the committed sample corpus."""

import contextlib
import errno
import fcntl
import io
import itertools
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from fractions import Fraction
from multiprocessing import synchronize
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow
import pytest
import regex
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import tokenize_text
import train_gpt
from tokenizer import GPT2, SPLIT, HuggingFace
from train_gpt import HERE, load_data_shard

ENCODING = GPT2().encoding
SAMPLE = GPT2(train_gpt.RECORDS["demo"].end_of_text)
DOCUMENTS = ["Once upon a time.\nThe end.", "it's 1611!\n", "äöü 中文 \U0001f600", "  two  ", "<|x"]
ODD = st.text(st.sampled_from("ab1 \n\r\t'.é中\x1c\x85\xa0\u3000\u200b\U0001f600"), max_size=12)
UNIT = st.tuples(ODD, st.sampled_from(["x \t", "中\n", "'ll ", "." + "\n" * 9])).map("".join)
TEXT = st.lists(UNIT, max_size=8).map(lambda units: "begin" + "".join(units))


def reference(documents) -> list[int]:
    return [token for text in documents for token in (50256, *ENCODING.encode_ordinary(text))]


def write_jsonl(path, documents, field="text"):
    path.write_text("".join(json.dumps({"id": 7, field: text}) + "\n" for text in documents))
    return path


def tokenize(*arguments, workers=1):
    tokenize_text.main(["--workers", str(workers), *map(str, arguments)])


def read(folder, pattern) -> list[int]:
    return [t for path in sorted(folder.glob(pattern)) for t in load_data_shard(path).tolist()]


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_sample_corpus_comes_out_byte_for_byte(tmp_path):
    names = {"train": "kjv_train_000001.bin", "val": "kjv_val_000000.bin"}
    for split, name in names.items():
        text = SAMPLE.encoding.decode(load_data_shard(HERE / "data" / name).tolist())
        write_jsonl(tmp_path / f"{split}.jsonl", text.split("<|endoftext|>")[1:])
    inputs = tmp_path / "train.jsonl", "--val", tmp_path / "val.jsonl"
    words = "--out", tmp_path / "out", "--name", "kjv", "--end_of_text", SAMPLE.end_of_text
    tokenize(*inputs, *words, workers=2)
    committed = {name: (HERE / "data" / name).read_bytes() for name in names.values()}
    assert contents(tmp_path / "out") == committed


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    documents=st.lists(TEXT | st.sampled_from(["", " \t\n"]), max_size=20),
    fraction=st.fractions(0, Fraction(1, 2), max_denominator=15),
    shard_size=st.integers(1, 100),
    batch=st.integers(1, 100),
    piece=st.integers(24, 40),
)
def test_shards_are_full_and_hold_each_document_once(
    documents, fraction, shard_size, batch, piece, tmp_path
):
    """Documents are cut where their tokens stay the same."""
    documents += ["at least one", "and another"]
    path, out = write_jsonl(tmp_path / "in.jsonl", documents), tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize_text, "BATCH", batch)
        patch.setattr(tokenize_text, "PIECE", piece)
        flags = "--val_fraction", fraction, "--shard_size", shard_size, "--overwrite"
        tokenize(path, "--out", out, *flags)
    kept = [text for text in documents if text.strip()]
    # the k-th validation document is the one into which the k-th step of 1/fraction falls
    chosen = {int(k / fraction) for k in range(len(kept)) if fraction}
    for split in ("val", "train"):
        expected = reference(t for i, t in enumerate(kept) if (i in chosen) == (split == "val"))
        sizes = [len(load_data_shard(path)) for path in sorted(out.glob(f"*_{split}_*"))]
        assert all(size == shard_size for size in sizes[:-1])
        assert read(out, f"*_{split}_*") == expected


def test_one_document_comes_back_whole_without_its_byte_order_mark(tmp_path):
    """This one has no place to cut: tiktoken alone fails on it."""
    text = "a" + " " * 1_200_000 + "b" * 600_000
    (tmp_path / "in.txt").write_bytes(text.encode("utf-8-sig"))
    tokenize(tmp_path / "in.txt", "--out", tmp_path / "out", "--val_fraction", 0)
    first, *tokens = read(tmp_path / "out", "*.bin")
    assert first == 50256 and max(tokens) < 50256 and ENCODING.decode(tokens) == text


def test_formats_folders_and_patterns_hold_the_same_documents(tmp_path, elsewhere, capsys):
    """Whatever characters are in their names."""
    (tmp_path / "texts[1]/b").mkdir(parents=True)
    for name, text in zip(["a", "b/1", "b/2", "c", "d"], DOCUMENTS, strict=True):
        (tmp_path / f"texts[1]/{name}.txt").write_text(text, encoding="utf-8")
    for name, mark in {"blocks": "\n \n\n", "marks": "\n<|endoftext|>\r\n"}.items():
        text = mark.join(text.strip("\n") for text in DOCUMENTS)
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    write_jsonl(tmp_path / "in.JSONL", DOCUMENTS[:2] + ["", None, "\t"] + DOCUMENTS[2:])
    write_jsonl(tmp_path / "body.jsonl", DOCUMENTS, "body")
    write_jsonl(tmp_path / "marks.jsonl", [(tmp_path / "marks.txt").read_text("utf-8")])
    parquet.write_table(pyarrow.table({"id": range(6), "text": [None, *DOCUMENTS]}), "in.Parquet")

    def of(words: str) -> list[int]:
        tokenize(*words.split(), "--out", "out", "--overwrite", "--val_fraction", 0)
        return read(tmp_path / "out", "text_train_*.bin")

    for words, left_out in {
        "in.JSONL": "left out, without text: 3 documents",
        "in.Parquet": "left out, without text: 1 documents",
        "texts[1]": "",
        "texts[1]/a.txt texts[1]/b texts[[]1]/?.txt": "",  # each file once
    }.items():
        assert of(words) == reference(DOCUMENTS)
        assert left_out in capsys.readouterr().err
    assert of("body.jsonl --field body") == reference(DOCUMENTS)
    stripped = reference(text.strip("\n") for text in DOCUMENTS)
    assert of("blocks.txt --blank_line_documents") == stripped
    assert capsys.readouterr().err == ""
    of("marks.txt marks.jsonl in.JSONL")
    said = "<|endoftext|> was read as text 8 times: --split_at '<|endoftext|>' makes documents"
    assert said in capsys.readouterr().err
    for file in ("marks.txt", "marks.jsonl"):
        assert of(f"{file} --split_at <|endoftext|>") == stripped
    assert of("texts[1] --val ./texts[1]/a.txt") == reference(DOCUMENTS[1:])
    assert read(tmp_path / "out", "text_val_*.bin") == reference(DOCUMENTS[:1])


@pytest.mark.parametrize("piece", range(1, 9))
def test_a_mark_is_found_wherever_pieces_of_a_text_end(piece, monkeypatch):
    monkeypatch.setattr(tokenize_text, "PIECE", piece)
    texts = ["", "one", "=", "=\n==\ntwo", "three = four", ""]
    found = tokenize_text.split_at_marks(io.StringIO("\n===\r\n".join(texts)), "===")
    assert [*found] == texts


TOKENS = list(range(50_256, 40_256, -1))
OTHERS = list(range(60_000, 50_000, -1))  # ids that GPT-2 does not have
DOCUMENT = reference(DOCUMENTS[:1])


def write_tokens(path, tokens=TOKENS):
    np.array(tokens, "<u2").tofile(path)


@pytest.mark.parametrize(
    ("words", "train", "val"),
    [
        ("train.bin --val_fraction 0.5", TOKENS, []),
        ("in.txt [tv]*.bin --val val.bin", TOKENS + DOCUMENT, TOKENS[:2000]),
        ("val.bin --val others.bin --tokenizer none", TOKENS[:2000], OTHERS),
        ("wide.npy renamed.bin", TOKENS * 2, []),
    ],
)
def test_tokens_without_a_header_get_one(words, train, val, elsewhere, monkeypatch, capsys):
    monkeypatch.setattr(tokenize_text, "PIECE", 1000)
    write_tokens("train.bin")
    write_tokens("val.bin", TOKENS[:2000])
    write_tokens("empty.bin", [])
    write_tokens("others.bin", OTHERS)
    np.save("wide.npy", np.array(TOKENS, ">i8"))
    np.save("tokens.npy", np.array(TOKENS, "<u2"))
    Path("tokens.npy").rename("renamed.bin")
    Path("in.txt").write_text(DOCUMENTS[0])
    tokenize(*words.split(), "--out", "out")
    assert read(Path("out"), "*_train_*.bin") == train
    assert read(Path("out"), "*_val_*.bin") == val
    assert f" --vocab_size {max(train + val) + 1} " in capsys.readouterr().out


ARRAYS = {"floats": np.ones(9), "square": np.ones((9, 9), int)}
ARRAYS |= {"large": [0, 2**16], "negative": [-1, 0]}
REFUSED = {
    "pipe.txt": "pipe.txt: not a regular file",
    "in.txt --tokenizer pipe.json --end_of_text 0": "pipe.json is no file",
    "in.txt --tokenizer wide.json --end_of_text 0": "wide.json has ids above 65535",
    "in.txt --val_fraction 1": "^2$",  # the status, after a line of argparse's
    "floats.npy": "holds float64 of 1 dim",
    "square.npy": "holds int64 of 2 dim",
    "large.npy": "ids from 0 to 65536",
    "negative.npy": "ids from -1 to 0",
    "torn.npy": "torn.npy: not a whole .npy",
    "shard.bin": "is a shard already: give it to --train_files",
    "odd.bin": "odd.bin: has 3 bytes, expected uint16",
    "empty.bin": "empty.bin: has 0 bytes, expected uint16",
    "raw.npy": "name it .bin if it is only uint16",
    "uint32.bin": r"np.save\('new.npy', np.fromfile\('uint32.bin', 'uint32'\)\)",
    "int32.bin": "seems to hold uint32, not uint16",
    "int64.bin": "seems to hold uint32, not uint16",
    "others.bin": "token 60000 is above --end_of_text: .* --tokenizer none",
    "in.txt --tokenizer none": "--tokenizer none is for the tokens of .bin",
    "in.txt --tokenizer odd.bin --end_of_text 0": "odd.bin is not a tokenizer.json",
    "in.txt --tokenizer own.json --end_of_text 9": "own.json has no token --end_of_text 9",
}


def test_other_files_are_refused(elsewhere):
    tokenize_text.write_shard(Path("shard.bin"), np.array(TOKENS, "<u2"))
    Path("odd.bin").write_bytes(b"abc")
    Path("empty.bin").touch()
    write_tokens("others.bin", OTHERS)
    Path("in.txt").write_text(DOCUMENTS[0])
    os.mkfifo("pipe.txt")
    os.mkfifo("pipe.json")
    wide = Tokenizer(models.WordLevel({"word": 0, "other": 2**16}, "other"))
    wide.save("wide.json")
    for name, array in ARRAYS.items():
        np.save(f"{name}.npy", array)
    Path("torn.npy").write_bytes(Path("floats.npy").read_bytes()[:-1])
    Tokenizer(models.WordLevel({"<s>": 0}, "<s>")).save("own.json")
    Path("raw.npy").write_bytes(Path("others.bin").read_bytes())
    for kind in ("uint32", "int32", "int64"):
        np.arange(200_000, dtype=kind).tofile(f"{kind}.bin")
    for words, message in REFUSED.items():
        with pytest.raises(SystemExit, match=message):
            tokenize(*words.split(), "--out", "out")
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["it.bin", "it.npy"])
def test_a_disk_without_memory_maps_is_named(name, elsewhere, monkeypatch):
    def memmap(*arguments, **options):
        raise OSError(errno.ENODEV, "No such device")

    np.save("it.npy", np.arange(9))
    write_tokens("it.bin")
    monkeypatch.setattr(np, "memmap", memmap)
    message = rf"{name}: cannot be mapped into memory \(No such device\): copy it to another disk"
    with pytest.raises(SystemExit, match=message):
        tokenize(name, "--out", "out")


def test_without_semaphores_one_process_makes_the_same_shards(tmp_path, monkeypatch, capsys):
    path = write_jsonl(tmp_path / "in.jsonl", DOCUMENTS)
    tokenize(path, "--out", tmp_path / "one")

    def sem_lock(*arguments):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(synchronize._multiprocessing, "SemLock", sem_lock)
    tokenize(path, "--out", tmp_path / "two", workers=2)
    assert "only one process can encode here ([Errno 38]" in capsys.readouterr().err
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not limit a job's cores")
def test_workers_are_as_many_as_a_job_has_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7})
    assert tokenize_text.parse_args(["in.txt", "--out", "out"]).workers == 3


def boundaries(tokens: list[int], encoding) -> set[int]:
    """Return where tokens end, in bytes of their text."""
    return {*itertools.accumulate(map(len, encoding.decode_tokens_bytes(tokens)))}


@pytest.mark.parametrize("count", [256, 300, 4095])
def test_the_first_tokens_are_the_same_merges_and_no_more(count):
    """All merges of GPT-2 end tokens where the first ones do, too; and no pair that one of the
    first would join is left."""
    text = (HERE / "README.md").read_text("utf-8") + "".join(DOCUMENTS)
    tokenizer = GPT2(count)
    tokens, encoding = tokenizer.encode(text), tokenizer.encoding
    assert max(tokens) < count and encoding.decode(tokens) == text
    assert boundaries(tokens, encoding) >= boundaries(ENCODING.encode_ordinary(text), ENCODING)
    words = [ENCODING.encode_ordinary(word) for word in regex.findall(SPLIT, text)]
    for word in {ENCODING.decode(word) for word in words}:
        pieces = encoding.decode_tokens_bytes(tokenizer.encode(word))
        for pair in map(b"".join, itertools.pairwise(pieces)):
            assert ENCODING._mergeable_ranks.get(pair, count) >= count


def test_tokens_of_a_tokenizer_json_are_its_own(elsewhere, capsys):
    """A document is one text for it, neither cut nor filled up; a mark in a text is ordinary text;
    the printed command says whose tokens they are."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    no_prefix_space = decoders.Strip(" ", 1, 0)
    trained.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse(), no_prefix_space])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet)
    trained.train_from_iterator(["it was the best of times, it was the worst of times"], trainer)
    trained.enable_truncation(99)
    trained.enable_padding(length=999)
    trained.save("own.json")
    trained.no_truncation()
    trained.no_padding()
    texts = ["it was the best", "the <s> worst of times " * 99]
    write_jsonl(Path("in.jsonl"), texts)
    words = "in.jsonl --out out --tokenizer own.json --end_of_text 0 --val_fraction 0"
    tokenize(*words.split(), workers=2)
    found = read(Path("out"), "*.bin")
    assert found[0] == 0 and found.count(0) == 2 and trained.get_vocab_size() <= max(found) + 9
    assert trained.decode(found[1:]).split() == " ".join(texts).split()
    end = found.index(0, 1)
    assert found[1:end] == trained.encode(texts[0], add_special_tokens=False).ids
    assert HuggingFace("own.json", 0).count_bytes(np.array(found)) == sum(map(len, texts))
    _, *words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    hp, _ = train_gpt.parse_args([*words, "--device", "cpu"], train_gpt.Run)
    assert (hp.tokenizer, hp.end_of_text) == ("own.json", 0)
    assert hp.vocab_size == trained.get_vocab_size()


def test_existing_shards_stay_or_are_replaced_without_a_rest(tmp_path):
    path, out = write_jsonl(tmp_path / "in.jsonl", DOCUMENTS * 200), tmp_path / "out"
    tokenize(path, "--out", out, "--shard_size", 1000)
    before = contents(out)
    with pytest.raises(SystemExit, match="text_train_000001.bin already exists.*--overwrite"):
        tokenize(path, "--out", out)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    with pytest.raises(SystemExit, match="could not write .*is the disk full"):
        tokenize(path, "--out", out, "--overwrite")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(out) == before and len(before) > 4
    (out / "notes").write_text("mine")
    with pytest.raises(SystemExit, match="the folder holds notes: name a new folder"):
        tokenize(path, "--out", out, "--overwrite")
    (out / "notes").unlink()
    tokenize(path, "--out", out, "--overwrite", "--val_fraction", 0)
    assert list(contents(out)) == ["text_train_000001.bin"]
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out"}
    assert read(out, "*.bin") == reference(DOCUMENTS * 200)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"}\n\n' + "[" * 100_000, "/it.jsonl:3: not JSON, or too deep: repair"),
        ('{"text": "a"}\n{"body": "b"}\n', "/it.jsonl:2: no field `text`: .* --field"),
        (f'{{"text": "{"Some words. " * 70}"}}', "no training text: .* a run needs 260 tokens, or"),
    ],
)
def test_an_error_leaves_nothing(text, message, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_text, "BATCH", 1)  # shards are written before it fails
    (tmp_path / "it.jsonl").write_text(text)
    with pytest.raises(SystemExit, match=message):
        tokenize(tmp_path / "it.jsonl", "--out", tmp_path / "out", "--shard_size", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["it.jsonl"]


def test_two_processes_do_not_write_one_folder(tmp_path):
    """Nor does one write a folder of the user's."""
    path, out = write_jsonl(tmp_path / "in.jsonl", DOCUMENTS), tmp_path / "out"
    notes = tmp_path / "out.unfinished/new/notes"
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    lock = os.open(tmp_path / "out.unfinished", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(SystemExit, match="another process is writing .*out.unfinished"):
        tokenize(path, "--out", out)
    os.close(lock)
    with pytest.raises(SystemExit, match="out.unfinished is not of tokenize_text.py: move it away"):
        tokenize(path, "--out", out)
    assert notes.read_text() == "mine" and not out.exists()


HELD = pytest.raises((SystemExit, train_gpt.UserError), match="another process is writing")


@pytest.mark.parametrize(
    ("number", "outcome", "lines"),
    [(errno.EACCES, HELD, 0), (errno.ENOLCK, contextlib.nullcontext(), 1)],
)
def test_a_file_system_without_locks_is_named_and_used(
    number, outcome, lines, tmp_path, monkeypatch, capsys
):
    """Another error says that another process holds the lock."""
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, "as it says")))
    path = write_jsonl(tmp_path / "in.jsonl", DOCUMENTS)
    with outcome:
        tokenize(path, "--out", tmp_path / "out")
    assert capsys.readouterr().err.count("cannot be locked (as it says)") == lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_all_processes_and_leaves_nothing_for_the_next_start(number, tmp_path):
    """It comes when two workers live, long before the end of the text."""
    write_jsonl(tmp_path / "a.jsonl", [DOCUMENTS[0] * 100_000])
    long = tmp_path / "b.txt"
    with long.open("wb") as file:  # 10 GB of zeros, which need no room
        file.truncate(10**10)
    words = [tokenize_text.__file__, "a.jsonl", "b.txt", "--out", "out", "--workers", "2"]
    options = {"cwd": tmp_path, "start_new_session": True, "stderr": subprocess.PIPE}
    program = subprocess.Popen([sys.executable, *words], **options)
    while len(living(program.pid)) < 3:
        assert program.poll() is None
        time.sleep(0.02)
    os.kill(program.pid, number)
    err = program.communicate(timeout=60)[1].decode()
    name = f"stopped by {number.name}\n"
    killed = number == signal.SIGKILL
    assert program.returncode == (-9 if killed else 128 + number) and (killed or name in err)
    assert (tmp_path / "out.unfinished").exists() == killed and not (tmp_path / "out").exists()
    end = time.monotonic() + 10
    while living(program.pid):
        assert time.monotonic() < end
        time.sleep(0.02)
    tokenize(tmp_path / "a.jsonl", "--out", tmp_path / "out", "--val_fraction", 0)
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "b.txt", "out"}


def living(group: int) -> list[str]:
    """Return the states of a group's processes that have not ended."""
    listed = subprocess.run(["ps", "-A", "-o", "pgid=,stat="], capture_output=True, text=True)
    lines = [line.split() for line in listed.stdout.splitlines()]
    return [state for pgid, state in lines if int(pgid) == group and state[0] != "Z"]


SENTENCE = "It was the best of times, it was the worst of times, said number 7. "


@pytest.mark.parametrize(
    ("documents", "flags"),
    [
        ([SENTENCE * 30], ""),
        ([SENTENCE * 30, "The end."], ""),
        ([SENTENCE] * 30, "--val_fraction 0"),
        ([SENTENCE * 9] * 300, ""),
    ],
)
def test_the_printed_command_finds_enough_in_a_short_text(documents, flags, tmp_path, capsys):
    """No token is lost, none is added, and a text that is cut keeps its order."""
    path, out = write_jsonl(tmp_path / "in.jsonl", documents), tmp_path / "a [b]" / "out"
    tokenize(path, "--out", out, *flags.split())
    lines = capsys.readouterr().out.splitlines()
    tokens = read(out, "*_train_*.bin") + read(out, "*_val_*.bin")
    is_cut = len(documents) < 3
    order = list if is_cut else sorted
    assert order(tokens) == order(reference(documents))
    shares = [len(read(out, f"*_{split}_*.bin")) for split in ("val", "train")]
    said = f"too few to choose from: the last {shares[0]} tokens are for validation"
    assert (f"documents: {len(documents)}, {said}" in lines) == is_cut
    assert shares[0] >= (0 if "fraction 0" in flags else max(130, 0.049 * sum(shares)))
    _, *words = shlex.split(lines[-1])
    hp, _ = train_gpt.parse_args([*words, "--device", "cpu"], train_gpt.Run)
    assert hp.seq_len * hp.batch_seqs >= min(1024, 0.5 * shares[1])
    batches = train_gpt.plan_batches(hp.train_files, hp, hp.num_iterations, train_gpt.consecutive)
    assert len(batches) == hp.num_iterations
    _, targets = train_gpt.validation_batch(hp, 0, 1, "cpu")
    assert targets.numel() == hp.val_tokens
