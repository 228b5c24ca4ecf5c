"""Export a checkpoint as a model for Hugging Face transformers.

    ./run.sh tools/export.py [CHECKPOINT] --export hf DIR     the newest checkpoint under logs/

DIR then holds weights (safetensors), settings, the tokenizer, and the script that saved the
checkpoint, in one file with all that it imports from the project. The model

    transformers.AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)

is the script's own, so it gives the script's logits, with the windows of the checkpoint's step.
AutoTokenizer does not know this model: without its type, it asks whether it may run DIR's code.

    transformers.AutoTokenizer.from_pretrained(DIR, tokenizer_type="gpt2")
    transformers.PreTrainedTokenizerFast.from_pretrained(DIR)     # of a run with a tokenizer.json

lm-evaluation-harness scores it on HellaSwag and other tasks:

    lm_eval --model hf --tasks hellaswag \\
        --model_args pretrained=DIR,trust_remote_code=True,add_bos_token=True,dtype=float32
"""

import contextlib
import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

import console
import train_gpt
from bundle import bundle
from checkpoint import Checkpoint, parse_with_checkpoint
from script import tokenizer_for
from tokenizer import GPT2, HuggingFace, gpt2_merges, gpt2_tokens
from train_gpt import RunSettings, UserError

MODELING = Path(__file__).with_name("modeling_speedrun.py")


def hf_config(checkpoint: Checkpoint) -> dict:
    """Return config.json: fields of SpeedrunConfig, and where transformers finds the classes."""
    end_of_text = checkpoint.hp.end_of_text
    of_run = vars(RunSettings())  # paths on this machine, among others
    settings = {name: value for name, value in vars(checkpoint.hp).items() if name not in of_run}
    return {
        "model_type": "nanogpt_speedrun",
        "architectures": ["SpeedrunForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{MODELING.stem}.SpeedrunConfig",
            "AutoModelForCausalLM": f"{MODELING.stem}.SpeedrunForCausalLM",
        },
        "dtype": "float32",
        "tie_word_embeddings": False,
        "vocab_size": tokenizer_for(checkpoint.hp).vocab_size,  # other rows were never trained
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "step": checkpoint.now.step,
        "settings": settings,
    }


def json_of(value: dict) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def tokenizer_files(tokenizer: GPT2 | HuggingFace) -> dict[str, str]:
    """Return the texts of a tokenizer's files by their names."""
    if isinstance(tokenizer, HuggingFace):
        config = {"tokenizer_class": "PreTrainedTokenizerFast"}
        files = {"tokenizer.json": tokenizer.path.read_text("utf-8")}
    else:
        config = {"tokenizer_class": "GPT2Tokenizer", "unk_token": tokenizer.mark}
        tokens = [*gpt2_tokens(tokenizer.end_of_text), tokenizer.mark]
        merges = "\n".join(gpt2_merges(tokenizer.end_of_text))
        files = {
            "vocab.json": json_of({token: i for i, token in enumerate(tokens)}),
            "merges.txt": f"{merges}\n",
        }
    config |= {"bos_token": tokenizer.mark, "eos_token": tokenizer.mark}
    return files | {"tokenizer_config.json": json_of(config)}


def export_hf(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the whole folder, or nothing. UserError if it exists."""
    if folder.exists():
        raise UserError(f"{folder} already exists: name a new folder, or remove it")
    if getattr(checkpoint.hp, "ngram_rows", 0):
        raise UserError(
            "a model with --ngram_rows cannot be exported: its table is not in the file"
        )
    model = checkpoint.model(torch.device("cpu"), compile="off")  # fails if the weights do not fit
    weights = {f"gpt.{name}": weight.contiguous() for name, weight in model.state_dict().items()}
    path = train_gpt.script_of(checkpoint.run_class)
    wrapper = MODELING.read_text("utf-8")
    wrapper = wrapper.replace('import_module("train_gpt")', f'import_module("{path.stem}")')
    code = bundle(path, wrapper)
    generation = {"eos_token_id": checkpoint.hp.end_of_text, "use_cache": False}
    texts = {
        "config.json": json_of(hf_config(checkpoint)),
        "generation_config.json": json_of(generation),
        MODELING.name: code,
        **tokenizer_files(tokenizer_for(checkpoint.hp)),
    }
    temporary = folder.with_name(f"{folder.name}.tmp")
    temporary.mkdir(parents=True)
    try:
        for name, text in texts.items():
            (temporary / name).write_text(text, "utf-8")
        with console.doing(f"writing {folder}"):
            save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        # save_file lets nobody else read its file, but some disks have no modes.
        with contextlib.suppress(OSError):
            shutil.copymode(temporary / "config.json", temporary / "model.safetensors")
        temporary.rename(folder)
    except SafetensorError as error:
        raise UserError(f"could not write {folder}: is the disk full? ({error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@console.program("export.py")
def main(words: list[str]) -> None:
    """Write the folder that the flags name; UserError if they are invalid."""
    parser = console.parser_of(__doc__)
    help_ = "write a Hugging Face model into the new folder DIR"
    parser.add_argument("--export", nargs=2, metavar=("hf", "DIR"), required=True, help=help_)
    args, checkpoint = parse_with_checkpoint(parser, words, of_text=True)
    kind, folder = args.export
    if kind != "hf":
        raise UserError(f"--export {kind}: the only format is hf")
    export_hf(checkpoint, Path(folder))
    folder = str(Path(folder).resolve())  # so that the code below runs in any folder
    print(f"{checkpoint}: exported to {folder}")
    print("import transformers")
    call = "transformers.{}.from_pretrained({!r}{})"
    print("model =", call.format("AutoModelForCausalLM", folder, ", trust_remote_code=True"))
    if checkpoint.hp.tokenizer == "gpt2":
        print("tokenizer =", call.format("AutoTokenizer", folder, ', tokenizer_type="gpt2"'))
    else:
        print("tokenizer =", call.format("PreTrainedTokenizerFast", folder, ""))


if __name__ == "__main__":
    main()
