"""zpccl keygen, and the secret options of zpccl-master."""

from __future__ import annotations

import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from interpreter import limited

from zpccl.cli.main import main
from zpccl.control.keys import master_keys, new_private_key, new_secret, peer_keys, read_allowed


def test_a_secret_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen"]) == main(["keygen"]) == 0
    first, second = capsys.readouterr().out.split()
    assert first != second and master_keys(first) and peer_keys(second)


def test_a_secret_goes_to_a_file_that_is_private(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.secret"
    assert main(["keygen", "--out", str(file)]) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and master_keys(secret_file=file)
    assert capsys.readouterr().out == ""
    before = file.read_text()
    assert main(["keygen", "--out", str(file)]) == 2, "it replaces no file"
    assert file.read_text() == before and "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--peer", "alice"]])
def test_a_full_disk_leaves_no_file(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the disk has room again, the same command works."""
    command = ["keygen", *arguments, "--out", str(tmp_path / "key")]
    with limited(resource.RLIMIT_FSIZE, 0):
        assert main(command) == 2
    written = capsys.readouterr()
    assert "cannot write" in written.err and written.out == "" and not list(tmp_path.iterdir())
    assert main(command) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_public_key_that_cannot_be_printed_leaves_no_file(tmp_path: Path) -> None:
    """Nothing prints it a second time, so the command has to be given again."""
    command = [sys.executable, "-m", "zpccl", "keygen", "--peer", "alice", "--out", str(tmp_path / "key")]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "zpccl: [Errno 28] No space left on device\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["--peer", "alice", "--out"]])
def test_a_key_that_would_go_nowhere_is_not_made(arguments: list[str], tmp_path: Path) -> None:
    """As in `zpccl keygen >&-`: print() would do nothing, and the command would seem to have succeeded."""
    arguments = [*arguments, str(tmp_path / "key")] if arguments else []
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "zpccl", "keygen", *arguments]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2 and "standard output is closed" in done.stderr
    assert not list(tmp_path.iterdir())


def test_key_pairs_make_an_allow_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("master", "alice", "bob"):
        assert main(["keygen", "--peer", name]) == 0
    master_line, *lines = capsys.readouterr().out.splitlines()
    Path("allow").write_text("\n".join(lines))
    assert list(read_allowed(Path("allow")).values()) == ["alice", "bob"]
    master = master_keys(secret_file="master.key", allow_file="allow")
    alice = peer_keys(Path("alice.key").read_text(), master_line.split()[0])
    assert master is not None and alice is not None and alice.master_public == master.public
    assert stat.S_IMODE(Path("alice.key").stat().st_mode) == 0o600
    assert main(["keygen", "--peer", "../mallory"]) == 2


def refused(*arguments: str) -> str:
    """What a master prints that does not start. It is a process of its own: the command sets logging and limits."""
    command = [sys.executable, "-m", "zpccl.cli.master", "--bind", "127.0.0.1:0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


@pytest.mark.parametrize("make", [new_secret, new_private_key])
def test_a_master_with_a_wrong_secret_does_not_start(make: Callable[[], str], tmp_path: Path) -> None:
    file = tmp_path / "secret"
    secret = make()
    file.write_text(secret[:-3])
    file.chmod(0o600)
    error = refused("--secret-file", str(file))
    assert "mistyped" in error and str(file) in error and secret[4:12] not in error


def test_a_master_does_not_start_with_an_empty_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZPCCL_SECRET", "")
    assert "ZPCCL_SECRET is empty" in refused()
