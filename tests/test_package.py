"""Promises of an installed zpccl: abi3 extension, typing marker, no import of torch, consistent metadata."""

from __future__ import annotations

import configparser
import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import zpccl

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(zpccl.__file__).resolve().parent


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read_string((ROOT / "setup.cfg").read_text(encoding="utf-8"))
    return config


def run_python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


def test_extension_is_abi3() -> None:
    from zpccl.engine import _native

    assert Path(_native.__file__).name == "_native.abi3.so"


def test_extension_keeps_its_assertions() -> None:
    """Python's own flags set -DNDEBUG; the C code relies on its assertions."""
    from zpccl.engine import _native

    assert b"__assert_fail" in Path(_native.__file__).read_bytes()


def test_extension_uses_only_the_stable_abi() -> None:
    """Private names of CPython may change between the versions that abi3 covers."""
    from zpccl.engine import _native

    command = ["nm", "--dynamic", "--undefined-only", _native.__file__]
    symbols = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    private = set(re.findall(r"\b_Py\w+", symbols))
    assert private <= {"_Py_NoneStruct", "_Py_Dealloc", "_Py_TrueStruct", "_Py_FalseStruct", "_Py_IncRef"}


def test_import_needs_no_torch() -> None:
    done = run_python("-c", "import sys; sys.modules['torch'] = None; import zpccl; print(zpccl.Communicator.__name__)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Communicator\n", "")


def test_import_does_not_import_torch() -> None:
    done = run_python("-c", "import sys, zpccl; sys.exit('torch' in sys.modules)")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_call_imports_nothing_of_numpy() -> None:
    """L1: after an interrupt in the middle of an import, the next import in another thread may wait forever."""
    call = "before = set(sys.modules); view(numpy.ones(1), 'send', writable=True)"
    done = run_python(
        "-c", f"import numpy, sys; from zpccl.engine.tensors import view; {call}; sys.exit(set(sys.modules) != before)"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_checkout_without_the_extension_says_so(tmp_path: Path) -> None:
    """After `pip install .` a program that is started in the checkout imports the sources there."""
    shutil.copytree(PACKAGE, tmp_path / "zpccl", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", "import zpccl"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: zpccl was imported from {tmp_path / 'zpccl'}, where")
    assert "pip install --editable ." in done.stderr


def test_public_names_exist() -> None:
    missing = [name for name in zpccl.__all__ if not hasattr(zpccl, name)]
    assert missing == []
    assert len(set(zpccl.__all__)) == len(zpccl.__all__)


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="module 'zpccl' has no attribute 'nothing'"):
        getattr(zpccl, "nothing")  # noqa: B009


def test_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_every_folder_with_modules_is_a_package() -> None:
    """A folder without __init__.py works in the checkout and is missing from the wheel."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_installed_metadata_are_those_of_setup_cfg(setup_cfg: configparser.ConfigParser) -> None:
    metadata = importlib.metadata.metadata("zpccl")
    assert metadata["Version"] == setup_cfg["metadata"]["version"] == zpccl.__version__
    assert metadata["Requires-Python"] == setup_cfg["options"]["python_requires"]
    assert metadata["License-Expression"] == "MIT"
    assert set(metadata.get_all("Provides-Extra") or ()) == set(setup_cfg["options.extras_require"])


def test_console_scripts_can_be_loaded() -> None:
    scripts = [
        script
        for script in importlib.metadata.entry_points(group="console_scripts")
        if script.name.startswith("zpccl") and script.dist is not None and script.dist.name == "zpccl"
    ]
    assert sorted(script.name for script in scripts) == ["zpccl", "zpccl-master"]
    for script in scripts:
        assert callable(script.load())


def test_setup_cfg_states_no_cffi_modules(setup_cfg: configparser.ConfigParser) -> None:
    """setup.cfg would ignore the key, and the build would succeed without C."""
    assert not any("cffi_modules" in section for section in setup_cfg.values())
    assert "cffi_modules" in (ROOT / "setup.py").read_text(encoding="utf-8")


def test_build_requirements_are_installed_by_make() -> None:
    """Nothing is built in isolation, so .venv must contain the requirements of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    requires = re.search(r"requires = \[(.*?)\]", text, re.DOTALL)
    assert requires is not None
    wanted = re.findall(r'"([^"]+)"', requires[1])
    done = run_python(ROOT / "tools/requirements.py", "dev")
    assert wanted
    assert set(wanted) <= set(done.stdout.splitlines())


def test_requirements_of_an_unknown_extra_are_an_error() -> None:
    done = run_python(ROOT / "tools/requirements.py", "nonsense")
    assert done.returncode == 1
    assert "nonsense" in done.stderr


def test_the_oldest_requirements_are_single_versions() -> None:
    done = run_python(ROOT / "tools/requirements.py", "--oldest", "secure", "test")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", line) for line in lines)


def test_what_only_linux_has_is_listed() -> None:
    """docs/portability.md names each module that uses a function or constant of Linux which macOS lacks."""
    listed = (ROOT / "docs/portability.md").read_text(encoding="utf-8").partition("## What macOS still needs")[2]
    for path in PACKAGE.rglob("*.py"):
        name, text = path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")
        for what in ("os.eventfd", "os.pidfd_open", "os.sched_getaffinity", "select.epoll", "MADV_HUGEPAGE"):
            if what in text:
                rows = [row for row in listed.splitlines() if what in row]
                assert any(f"`{name}`" in row or f"`{name.partition('/')[0]}`" in row for row in rows), (name, what)
