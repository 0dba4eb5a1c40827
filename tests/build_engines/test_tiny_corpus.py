"""The list of training files, and the split."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from build_engines.tiny import corpus as corpora
from build_engines.tiny.config import CHECKPOINT_DIR
from build_engines.tiny.tokenizer import end_of_text, load_tokenizer


def test_the_manifest_adds_up() -> None:
    head = json.loads(corpora.MANIFEST.read_text())
    files = corpora.read_manifest()
    held = [file for file in files if file.role == "held_out"]
    assert head["files"] == len(files)
    assert head["bytes"] == sum(file.size for file in files)
    assert head["held_out_files"] == len(held)
    assert head["held_out_bytes"] == sum(file.size for file in held)
    assert 0.02 < head["held_out_bytes"] / head["bytes"] < 0.08
    assert max(file.size for file in held) < head["held_out_bytes"] / 4


def test_the_manifest_is_sorted_relative_and_split_by_name() -> None:
    files = corpora.read_manifest()
    names = [file.path for file in files]
    assert names == sorted(set(names))
    assert all(name.endswith(".py") and not name.startswith("/") and ".." not in name for name in names)
    assert not any("site-packages" in name for name in names)
    assert all(len(file.sha256) == 64 for file in files)
    assert [file.role for file in files] == [corpora.role_of(name) for name in names]
    assert [file.path for file in files if file.role == "prose"] == [corpora.PROSE]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A standard library of three files, one of them not UTF-8, and a package that was installed into it."""
    (tmp_path / "email").mkdir()
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "b.py").write_text("pass\n")
    (tmp_path / "email" / "a.py").write_bytes(b"# caf\xe9\nx = 1\n")
    (tmp_path / "z.py").write_text("y = 2\n")
    (tmp_path / "site-packages" / "other.py").write_text("no = True\n")
    return tmp_path


def test_a_scan_lists_sources_and_leaves_installed_packages_out(library: Path, tmp_path: Path) -> None:
    files = corpora.scan(library)
    assert [file.path for file in files] == ["b.py", "email/a.py", "z.py"]
    assert files[0].sha256 == hashlib.sha256(b"pass\n").hexdigest()
    corpora.write_manifest(files, tmp_path / "list.json")
    assert corpora.read_manifest(tmp_path / "list.json") == files


def test_undecodable_bytes_are_dropped_and_counted(library: Path) -> None:
    text, dropped = corpora.read_text(library, corpora.scan(library)[1])
    assert (text, dropped) == ("# caf\nx = 1\n", 1)


def test_a_changed_file_is_refused(library: Path) -> None:
    files = corpora.scan(library)
    (library / "b.py").write_text("changed\n")
    with pytest.raises(ValueError, match=r"b\.py is 8 bytes"):
        corpora.read_text(library, files[0])


def test_documents_are_separated_and_the_split_is_kept(library: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(CHECKPOINT_DIR)
    files = [
        corpora.SourceFile(file.path, file.sha256, file.size, "held_out" if file.path == "z.py" else "train")
        for file in corpora.scan(library)
    ]
    corpus = corpora.encode_corpus(library, files, tokenizer, tmp_path / "cache" / "tokens.npz")
    end = end_of_text(tokenizer)
    assert tokenizer.decode(corpus.train.tolist(), skip_special_tokens=True) == "pass\n# caf\nx = 1\n"
    assert int((corpus.train == end).sum()) == 2
    assert corpus.held_out.tolist() == [*tokenizer.encode("y = 2\n").ids, end]
    again = corpora.encode_corpus(library, files, tokenizer, tmp_path / "cache" / "tokens.npz")
    assert again.train.tolist() == corpus.train.tolist()


def test_an_empty_library_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="0 Python files"):
        corpora.scan(tmp_path)
