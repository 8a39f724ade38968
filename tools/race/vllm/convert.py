"""Converts a chat model from GGUF to safetensors. Runs in vLLM's environment.

    convert.py FILE.gguf FOLDER
"""

import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(file: pathlib.Path, folder: pathlib.Path) -> None:
    source, name = str(file.parent), file.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    # Copies the weights into a new model, because a model that was read from GGUF is quantised and cannot be saved.
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict(), strict=False)
    model.tie_weights()
    draft = folder.with_name(f"{folder.name}.draft")
    model.to(torch.bfloat16).save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    draft.rename(folder)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
