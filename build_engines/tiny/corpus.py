"""The training text: the standard library's own Python sources, listed with their hashes.

A file is held out when the first four bytes of the sha256 of its relative path fall in the lowest 4%: the split
depends on names alone, so that another Python version holds out the same modules. One file is neither trained on nor
counted as held out: `pydoc_data/topics.py`, 0.75 MB of the language reference as English text in string literals. It
would be half of the held-out bytes, and is scored by itself.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .tokenizer import end_of_text

MANIFEST = Path(__file__).parent / "corpus.json"
HELD_OUT_SHARE = 0.04
PROSE = "pydoc_data/topics.py"
Role = Literal["train", "held_out", "prose"]
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class SourceFile:
    """One source: its path under the standard library, sha256, size in bytes, and what it is for."""

    path: str
    sha256: str
    size: int
    role: Role


def stdlib_root() -> Path:
    """Where this interpreter keeps its standard library."""
    return Path(sysconfig.get_path("stdlib"))


def role_of(path: str) -> Role:
    """What the file at relative `path` is for."""
    if path == PROSE:
        return "prose"
    draw = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") / 2**32
    return "held_out" if draw < HELD_OUT_SHARE else "train"


def scan(root: Path) -> list[SourceFile]:
    """List every `.py` file under `root`, sorted by path, installed packages left out.

    Raises:
        FileNotFoundError: if there is none.
    """
    found = []
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS.intersection(relative.parts) or not path.is_file():
            continue
        raw = path.read_bytes()
        name = relative.as_posix()
        found.append(SourceFile(name, hashlib.sha256(raw).hexdigest(), len(raw), role_of(name)))
    if not found:
        raise FileNotFoundError(f"0 Python files under {root}")
    return found


def write_manifest(files: list[SourceFile], target: Path = MANIFEST) -> None:
    """Record what the model is trained on; one file a line keeps differences readable."""
    header = {
        "python": platform.python_version(),
        "files": len(files),
        "bytes": sum(f.size for f in files),
        "held_out_files": sum(f.role == "held_out" for f in files),
        "held_out_bytes": sum(f.size for f in files if f.role == "held_out"),
        "columns": ["path", "sha256", "size", "role"],
    }
    rows = ",\n".join(json.dumps([f.path, f.sha256, f.size, f.role]) for f in files)
    head = json.dumps(header, indent=1)[:-2]
    target.write_text(f'{head},\n "sources": [\n{rows}\n]}}\n')


def read_manifest(source: Path = MANIFEST) -> list[SourceFile]:
    """Read the list back."""
    rows = json.loads(source.read_text())["sources"]
    return [SourceFile(path, digest, size, role) for path, digest, size, role in rows]


def read_text(root: Path, file: SourceFile) -> tuple[str, int]:
    """The text of a source as UTF-8, and how many undecodable characters were dropped.

    Raises:
        ValueError: if the file is not the one the manifest lists.
    """
    raw = (root / file.path).read_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    if digest != file.sha256:
        raise ValueError(
            f"{file.path} is {len(raw)} bytes with sha256 {digest[:12]}; the manifest lists {file.size} bytes with "
            f"{file.sha256[:12]}: run `prepare` to list this interpreter's files"
        )
    marked = raw.decode("utf-8", errors="replace")
    text = raw.decode("utf-8", errors="ignore")
    return text, len(marked) - len(text)


@dataclass(frozen=True)
class Corpus:
    """Token ids, every document followed by the end-of-text token; `uint16`, one dimension each."""

    train: NDArray[np.uint16]
    held_out: NDArray[np.uint16]
    prose: NDArray[np.uint16]


def encode_corpus(root: Path, files: list[SourceFile], tokenizer: Tokenizer, cache: Path) -> Corpus:
    """Tokenise every file in path order, or read the result of an earlier call back from `cache` (an `.npz`)."""
    if cache.exists():
        stored = np.load(cache)
        return Corpus(stored["train"], stored["held_out"], stored["prose"])
    end = end_of_text(tokenizer)
    parts: dict[Role, list[int]] = {"train": [], "held_out": [], "prose": []}
    for start in range(0, len(files), 64):
        batch = files[start : start + 64]
        encoded = tokenizer.encode_batch([read_text(root, f)[0] for f in batch], add_special_tokens=False)
        for file, encoding in zip(batch, encoded, strict=True):
            parts[file.role].extend(encoding.ids)
            parts[file.role].append(end)
    corpus = Corpus(**{role: np.array(ids, dtype=np.uint16) for role, ids in parts.items()})
    cache.parent.mkdir(parents=True, exist_ok=True)
    np.savez(cache, train=corpus.train, held_out=corpus.held_out, prose=corpus.prose)
    return corpus
