"""Writes the quick start's untrained model: a two-layer Qwen2 with the arithmetic tokenizer, as an HF folder."""

from __future__ import annotations

import argparse

import torch
import transformers

from megarl.data.generated import write_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="HF model folder to write")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    write_tokenizer(options.out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.out)
    torch.manual_seed(options.seed)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        max_position_embeddings=128,
        initializer_range=0.06,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(options.out)


if __name__ == "__main__":
    main()
