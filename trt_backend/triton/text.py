"""Text in and out: the model's tokenizer, and a detokeniser that turns a growing list of tokens into text pieces."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as RawTokenizer

from trt_backend.config import ConfigError

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer:
    """A byte-level BPE tokenizer, read from a checkpoint folder. Safe to use from several threads."""

    def __init__(self, raw: RawTokenizer) -> None:
        self._raw = raw
        self._pieces = _token_bytes(raw)
        self.longest_token_bytes = max(map(len, self._pieces), default=1)

    @classmethod
    def load(cls, folder: Path, vocab_size: int) -> Tokenizer:
        """Read `tokenizer.json`.

        Raises:
            ConfigError: the file is missing, damaged, not byte-level, or has token ids that the model does not.
        """
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise ConfigError(f"{path}: the tokenizer is missing; a checkpoint folder needs one beside config.json")
        try:
            raw = RawTokenizer.from_file(str(path))
            decoder = (json.loads(path.read_text(encoding="utf-8")).get("decoder") or {}).get("type")
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path}: can't be read as a tokenizer: {error}") from error
        if decoder != "ByteLevel":
            raise ConfigError(f"{path}: decoder.type={decoder!r} is not supported; legal value: 'ByteLevel'")
        highest = max(raw.get_vocab(with_added_tokens=True).values(), default=-1)
        if highest >= vocab_size:
            raise ConfigError(
                f"{path}: has token id {highest}; the model's vocab_size={vocab_size} allows 0 to {vocab_size - 1}"
            )
        return cls(raw)

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Token ids, int32 [tokens], with whatever the tokenizer puts around a text (BOS and the like)."""
        return np.asarray(self._raw.encode(text).ids, dtype=np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """All of a finished list of tokens; special tokens have no text."""
        return self._raw.decode(list(tokens), skip_special_tokens=True)

    def show(self, token: int) -> str:
        """One token as text, for people: bytes that are no character of their own become a replacement character."""
        return self.piece(token).decode(errors="replace")

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for; none for special tokens and ids that the tokenizer does not have."""
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""


class Detokenizer:
    """Turns the tokens of one request into text as they come.

    A token may end in the middle of a character: its bytes are held back until the rest is there. All pieces together
    are what `Tokenizer.decode` gives for all tokens together.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Iterable[int]) -> str:
        """Text that is complete with these tokens; perhaps none."""
        return self._decoder.decode(b"".join(map(self._tokenizer.piece, tokens)))

    def flush(self) -> str:
        """What is left at the end: a replacement character where a character stayed incomplete."""
        return self._decoder.decode(b"", final=True)


class StopFinder:
    """Looks for stop strings in a text that grows.

    The answer ends where a stop string is first complete; of several that are complete at the same character, the
    longest counts. What could still become one is held back, so none of it is ever shown; how the text is cut into
    pieces makes no difference. `keep` shows the stop string itself.
    """

    def __init__(self, stops: Iterable[str], keep: bool = False) -> None:
        self._stops = tuple(stops)
        self._keep = keep
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        """Text that can be shown, and whether a stop string has ended the answer: then nothing may follow.

        Stop strings that are completed while `may_stop` is False are text like any other.
        """
        fresh = len(self._held)
        self._held += text
        if may_stop:
            found = self._first(fresh)
            if found is not None:
                start, end = found
                shown, self._held = self._held[: end if self._keep else start], ""
                return shown, True
        kept = self._longest_beginning()
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return shown, False

    def flush(self) -> str:
        """What is held back, when no more text comes."""
        shown, self._held = self._held, ""
        return shown

    def _first(self, fresh: int) -> tuple[int, int] | None:
        """Start and end of the stop string that is complete first, among those that end after `fresh` characters."""
        found = []
        for stop in self._stops:
            start = self._held.find(stop, max(0, fresh - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        if not found:
            return None
        end, start = min(found)
        return start, end

    def _longest_beginning(self) -> int:
        """Length of the longest end of what is held that begins a stop string and is not all of it."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest


def read_end_ids(folder: Path, fallback: Iterable[int]) -> frozenset[int]:
    """Token ids that end a text: `eos_token_id` of generation_config.json if there is one, else `fallback`.

    Raises:
        ConfigError: the file is damaged.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return frozenset(fallback)
    try:
        ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: can't be read as a JSON object: {error}") from error
    if ends is None:
        return frozenset(fallback)
    ids = ends if isinstance(ends, list) else [ends]
    if any(isinstance(end, bool) or not isinstance(end, int) or end < 0 for end in ids):
        raise ConfigError(f"{path}: eos_token_id={ends!r}: legal: a token id or a list of them")
    return frozenset(ids)


def _token_bytes(raw: RawTokenizer) -> list[bytes]:
    """Token id → bytes.

    Byte-level BPE (GPT-2's) writes each byte as one printable character; a token with any other character in it was
    added as plain text.
    """
    byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
    special = {token for token, added in raw.get_added_tokens_decoder().items() if added.special}
    vocabulary = raw.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for text, token in vocabulary.items():
        if token in special:
            continue
        if all(character in byte_of for character in text):
            pieces[token] = bytes(byte_of[character] for character in text)
        else:
            pieces[token] = text.encode()
    return pieces


def _byte_characters() -> list[str]:
    """The printable character of each byte: itself where it has one in Latin-1, else the next from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, spare = [], 0x100
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(spare))
            spare += 1
    return characters
