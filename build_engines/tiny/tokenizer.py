"""The byte-level BPE of `glm53-tiny`: 2048 tokens learnt from the training files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, PAD)

# After the pre-tokeniser of cl100k: a word takes one leading mark (so `.append` and `_name` are one piece), and digits
# go in threes. Ours differs where Python does: a line break takes the following indentation except its last space,
# which stays with the word, so that `):\n        return` is two pieces.
PIECES = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+(?:[\r\n]+(?: +(?= ))?)?"
    r"|\s*[\r\n]+(?: +(?= ))?|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn the merges.

    Args:
        texts: documents; each is read once.
        vocab_size: tokens in all, special ones and the 256 bytes included.

    Raises:
        ValueError: if the corpus is too small to fill the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"learnt {tokenizer.get_vocab_size()} tokens where {vocab_size} were asked for")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Write `tokenizer.json` and the `tokenizer_config.json` that transformers' AutoTokenizer reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read `tokenizer.json` of a checkpoint folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def end_of_text(tokenizer: Tokenizer) -> int:
    """The id of the token between documents.

    Raises:
        KeyError: if the tokeniser has none.
    """
    token: int | None = tokenizer.token_to_id(END_OF_TEXT)
    if token is None:
        raise KeyError(f"{END_OF_TEXT} is not among the {tokenizer.get_vocab_size()} tokens")
    return token


def token_bytes(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """How many bytes of text each token stands for, `[vocab_size]`; special tokens stand for none.

    Byte-level BPE writes one printable character for a byte, so a token's length in characters is its length in bytes.
    """
    size = tokenizer.get_vocab_size()
    lengths = np.zeros(size, dtype=np.int64)
    for token in range(size):
        text = tokenizer.id_to_token(token) or ""
        lengths[token] = 0 if text in SPECIAL_TOKENS else len(text)
    return lengths
