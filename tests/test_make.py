"""The Makefiles handle paths and versions that a shell or make itself would split."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(folder: Path, *arguments: str) -> str:
    """Runs make and returns its output. That make knows nothing of a `make` that may run this test."""
    command = ["make", "--no-print-directory", "-C", str(folder), *arguments]
    environment = {"PATH": os.environ["PATH"]}
    return subprocess.run(command, text=True, capture_output=True, check=True, env=environment).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in a folder with a space in its name, beside other files."""
    root = tmp_path / "mine" / "two words" / "zpccl"
    shutil.copytree(ROOT / "native", root / "native", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "tools").mkdir()
    for name in ("Makefile", "setup.cfg", "setup.py", "pyproject.toml", "tools/requirements.py"):
        shutil.copy2(ROOT / name, root / name)
    return root


def test_clean_removes_what_was_built_and_nothing_else(checkout: Path) -> None:
    """A path that is split at its space names another folder."""
    built, other = checkout / "build" / "native" / "plain.o", checkout.parents[1] / "other"
    built.parent.mkdir(parents=True)
    for path in (built, other):
        path.touch()
    make(checkout / "native", "clean")
    assert other.exists() and not built.parent.exists()


def test_clean_by_another_way_removes_nothing(checkout: Path) -> None:
    """Relative paths start where `make` runs."""
    other = checkout.parent / "build" / "native" / "of another"
    other.parent.mkdir(parents=True)
    other.touch()
    with pytest.raises(subprocess.CalledProcessError) as caught:
        make(checkout, "--file", "native/Makefile", "clean")
    assert other.exists() and "make -C native" in caught.value.stderr


def test_clean_keeps_what_has_the_begin_of_the_name_of_an_environment(checkout: Path) -> None:
    said = make(checkout, "--dry-run", "clean", "VENV=/home/me/two words")
    assert "'/home/me/two words/.installed'" in said


def test_all_sources_are_compiled_wherever_they_are(checkout: Path) -> None:
    said = make(checkout / "native", "--dry-run", "strict")
    assert all(f" -c {source.name} -o " in said for source in (ROOT / "native").glob("*.c") if source.stem != "_native")


def test_fuzz_targets_run_wherever_they_are(checkout: Path) -> None:
    said = make(checkout, "--dry-run", "fuzz")
    assert f"'{checkout}/.venv/bin/python' -m fuzz" in said and f"--directory '{checkout}/out/fuzz'" in said


def test_a_version_of_torch_is_not_a_redirection(checkout: Path) -> None:
    said = make(checkout, "--dry-run", "test-torch", "TORCH=torch>=2.2")
    assert "touch '.venv/.torch>-2.2'\n" in said
