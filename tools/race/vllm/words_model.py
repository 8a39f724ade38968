"""Makes the model that Dynamo's mocker serves: a tokenizer and what describes a model, without weights.

    words_model.py FOLDER

Runs in Dynamo's environment. The tokenizer is a BPE of 20,000 words, trained on words like those of the race: random letters. A
token has 2.5 bytes of such a text; a tokenizer for four bytes would have to know half a million words.
"""

import json
import pathlib
import random
import string
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = 20_000
# The lengths of words, as in `tools/race/cells`: 3 to 9 letters, and a space behind each word.
LETTERS = (3, 9)
TEXTS, TEXT_WORDS = 200, 1_000
TOKENS_MAX = 131_072
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": WORDS, "max_position_embeddings": TOKENS_MAX,
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "bos_token_id": None, "eos_token_id": 0, "torch_dtype": "float32",
}  # fmt: skip


def text(rng: random.Random) -> str:
    words = ("".join(rng.choices(string.ascii_lowercase, k=rng.randint(*LETTERS))) for _ in range(TEXT_WORDS))
    return " ".join(words)


def trained() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=WORDS, special_tokens=SPECIAL, initial_alphabet=letters, show_progress=False)
    rng = random.Random(1)
    tokenizer.train_from_iterator((text(rng) for _ in range(TEXTS)), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0], model_max_length=TOKENS_MAX)
    fast.chat_template = TEMPLATE
    return fast


def main(folder: pathlib.Path) -> None:
    draft = folder.with_name(f"{folder.name}.draft")
    trained().save_pretrained(draft)
    (draft / "config.json").write_text(json.dumps(CONFIG))
    (draft / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    draft.rename(folder)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
