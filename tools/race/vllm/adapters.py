"""Makes LoRA adapters with random weights. The weights are so small that answers stay sensible. Runs in vLLM's environment.

    adapters.py MODEL FOLDER
"""

import json
import pathlib
import sys

import torch
from safetensors.torch import save_file

NAMES = ("red", "blue")
RANK = 8
SCALE = 1e-3
MODULES = ("q_proj", "v_proj")


def weights(config: dict, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    outputs = {"q_proj": heads * head, "v_proj": config["num_key_value_heads"] * head}
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module in MODULES:
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator) * SCALE
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs[module], RANK, generator=generator) * SCALE
    return tensors


def main(model: pathlib.Path, folder: pathlib.Path) -> None:
    config = json.loads((model / "config.json").read_text())
    for seed, name in enumerate(NAMES):
        (folder / name).mkdir(parents=True)
        about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "target_modules": list(MODULES), "bias": "none"}
        (folder / name / "adapter_config.json").write_text(json.dumps(about))
        save_file(weights(config, seed), folder / name / "adapter_model.safetensors")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
