"""Export a checkpoint as a model for Hugging Face transformers.

    ./run.sh tools/export.py [CHECKPOINT] --export hf DIR     the newest checkpoint under logs/

DIR then holds weights (safetensors), settings, GPT-2's tokenizer, and the script that saved the
checkpoint, in one file with all that it imports from the project. The model

    transformers.AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)

is the script's own, so it gives the script's logits, with the windows of the checkpoint's step.
AutoTokenizer does not know this model: without its type, it asks whether it may run DIR's code.

    transformers.AutoTokenizer.from_pretrained(DIR, tokenizer_type="gpt2")

lm-evaluation-harness scores it on HellaSwag and other tasks:

    lm_eval --model hf --tasks hellaswag \\
        --model_args pretrained=DIR,trust_remote_code=True,add_bos_token=True,dtype=float32
"""

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
from gpt2 import MERGES, gpt2_tokens
from train_gpt import END_OF_TEXT, RunSettings, UserError

MODELING = Path(__file__).with_name("modeling_speedrun.py")


def hf_config(checkpoint: Checkpoint) -> dict:
    """Return config.json: fields of SpeedrunConfig, and where transformers finds the classes."""
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
        "vocab_size": END_OF_TEXT + 1,  # the other rows were never trained
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END_OF_TEXT,
        "step": checkpoint.now.step,
        "settings": settings,
    }


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
    tokens = {token: i for i, token in enumerate([*gpt2_tokens(), "<|endoftext|>"])}
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    texts = {
        "config.json": hf_config(checkpoint),
        "generation_config.json": {"eos_token_id": END_OF_TEXT, "use_cache": False},
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", **special},
        "vocab.json": tokens,
    }
    temporary = folder.with_name(f"{folder.name}.tmp")
    temporary.mkdir(parents=True)
    try:
        for name, value in texts.items():
            (temporary / name).write_text(json.dumps(value, indent=2, ensure_ascii=False), "utf-8")
        (temporary / MODELING.name).write_text(code, "utf-8")
        shutil.copy(MERGES, temporary / "merges.txt")
        with console.doing(f"writing {folder}"):
            save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
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
    call = "transformers.Auto{}.from_pretrained({!r}, {})"
    print("model =", call.format("ModelForCausalLM", folder, "trust_remote_code=True"))
    print("tokenizer =", call.format("Tokenizer", folder, 'tokenizer_type="gpt2"'))


if __name__ == "__main__":
    main()
