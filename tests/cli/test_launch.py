"""zpccl launch: several processes of a program, with real processes and signals."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from e2e.harness import HANG_SECONDS, until

from zpccl.cli.launch import Chaos, Launcher, parse_chaos
from zpccl.cli.main import main
from zpccl.errors import InvalidArgument

pytestmark = pytest.mark.e2e

HELLO = Path(__file__).parents[2] / "examples" / "hello.py"


def launch(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "zpccl", "launch", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def output_of(*arguments: str | Path) -> tuple[int, list[str]]:
    with launch(*arguments) as process:
        output, _ = process.communicate(timeout=HANG_SECONDS)
        return process.returncode, output.splitlines()


def lines_until(process: subprocess.Popen[str], pattern: str, count: int) -> Iterator[str]:
    """The lines of a launcher, up to the one that completes `count` matches."""
    assert process.stdout is not None
    while count:
        line = process.stdout.readline()
        assert line, "it has ended"
        count -= bool(re.search(pattern, line))
        yield line


def test_peers_find_the_master_and_their_lines_are_prefixed() -> None:
    status, lines = output_of("-n", "3", "--", sys.executable, HELLO, "3")
    assert status == 0
    found = [re.fullmatch(r"\[(\d)\] rank (\d) of 3: \[6\. 6\. 6\. 6\.\]", line) for line in lines]
    assert (
        sorted(match[1] for match in found if match) == sorted(match[2] for match in found if match) == ["0", "1", "2"]
    )


def test_torch_finds_its_variables() -> None:
    names = "$RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR ${MASTER_PORT:+port} $ZPCCL_NAME"
    status, lines = output_of("-n", "2", "--master", "example.org:1", "--", "sh", "-c", f"echo {names} $ZPCCL_MASTER")
    assert status == 0
    assert sorted(lines) == [f"[{i}] {i} 2 {i} 127.0.0.1 port peer{i} example.org:1" for i in range(2)]


def test_a_variable_that_is_empty_is_as_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the launcher starts a master."""
    monkeypatch.setenv("ZPCCL_MASTER", "")
    monkeypatch.setenv("ZPCCL_NAME", "")
    assert output_of("-n", "1", "--", "sh", "-c", "echo ${ZPCCL_MASTER%:*} $ZPCCL_NAME") == (0, ["[0] 127.0.0.1 peer0"])


def test_the_status_is_that_of_the_first_failure_and_others_go_on(tmp_path: Path) -> None:
    program = f"if [ $RANK = 0 ]; then exit 7; fi; while ! [ -e {tmp_path}/go ]; do sleep 0.05; done; kill -9 $$"
    with launch("-n", "2", "--", "sh", "-c", program) as process:
        assert list(lines_until(process, "status", 1)) == ["[0] zpccl launch: ended with status 7\n"]
        (tmp_path / "go").touch()
        output, _ = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, output) == (7, "[1] zpccl launch: ended with status 137\n")


WAITS = "trap 'echo interrupted; exit 3' {}; echo ready; while true; do sleep 0.05; done"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_signal_ends_all(number: signal.Signals, status: int) -> None:
    with launch("-n", "3", "--", "bash", "-c", WAITS.format("INT TERM")) as process:
        list(lines_until(process, "ready", 3))
        process.send_signal(number)
        output, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == status
    lines = [line for line in output.splitlines() if "Terminated" not in line]  # bash reports the end of its sleep.
    assert sorted(lines) == [f"[{i}] interrupted" for i in range(3)]


def test_ctrl_c_when_the_master_has_just_started() -> None:
    """L1: the command ends."""
    text = """
import socket, sys, zpccl.cli.main
def interrupted():
    raise KeyboardInterrupt
socket.socketpair = interrupted
sys.exit(zpccl.cli.main.main(["launch", "--", "true"]))
"""
    environment = {name: value for name, value in os.environ.items() if name != "ZPCCL_MASTER"}
    done = subprocess.run([sys.executable, "-c", text], timeout=HANG_SECONDS, env=environment, check=False)
    assert done.returncode == 130


def test_a_second_signal_kills_who_does_not_end() -> None:
    stubborn = "trap 'echo no' INT; echo ready; while true; do sleep 0.05; done"
    with launch("-n", "2", "--", "bash", "-c", stubborn) as process:
        list(lines_until(process, "ready", 2))
        process.send_signal(signal.SIGINT)
        list(lines_until(process, "no", 2))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130


def test_chaos_kills_and_joins() -> None:
    """A process that joins has none of torch's variables: ranks are fixed."""
    program = "echo as ${RANK:-none}; sleep 1000"
    with launch("-n", "2", "--chaos", "kill=0.2s,join=0.3s", "--", "sh", "-c", program) as process:
        for what in ("killed on purpose", " joins", " as none"):
            list(lines_until(process, what, 1))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 143


def test_chaos_leaves_the_last_one_alone_and_ends_with_the_first_that_is_done(tmp_path: Path) -> None:
    program = f"while ! [ -e {tmp_path}/go ]; do sleep 0.02; done; echo done"
    with launch("-n", "2", "--chaos", "kill=0.1s", "--", "bash", "-c", program) as process:
        list(lines_until(process, "on purpose", 1))
        (tmp_path / "go").touch()
        output, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0 and "done" in output and "on purpose" not in output


def test_who_joins_too_late_is_ended(tmp_path: Path) -> None:
    """Otherwise it would wait for ever for processes that are done."""
    program = (
        f'[ "$RANK" ] || {{ touch {tmp_path}/go; exec sleep 1000; }}; until [ -e {tmp_path}/go ]; do sleep 0.02; done'
    )
    status, lines = output_of("-n", "2", "--chaos", "join=0.3s", "--", "sh", "-c", program)
    assert status == 0 and lines[-1].endswith("killed, as it came too late")


def test_a_launcher_that_has_stood_still_makes_up_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood still (Ctrl-Z, or nobody read its output) for as long as 100 processes take to join."""
    go, pid = tmp_path / "go", tmp_path / "pid"
    waits = f"until [ -e {go} ]; do sleep 0.02; done"
    joins = f"touch {go}; while kill -0 $(cat {pid}); do sleep 0.02; done"
    program = f'if [ "$RANK" ]; then echo $$ >{pid}; echo ready; {waits}; else {joins}; fi; exit 0'
    written = tmp_path / "output"

    def jumping_s() -> float:
        return time.monotonic() + (10_000.0 if "ready" in written.read_text() else 0.0)

    monkeypatch.setattr("zpccl.cli.launch.time", SimpleNamespace(monotonic=jumping_s))
    with written.open("wb") as output:
        Launcher(["sh", "-c", program], 1, "example.org:1", Chaos(join_s=100.0), output).run()
    assert written.read_text().count(" joins") == 1


def test_long_lines_are_cut() -> None:
    status, lines = output_of("-n", "1", "--", sys.executable, "-c", "print('x' * 200_000); print('end', end='')")
    assert status == 0 and len(lines) > 3 and lines[-1] == "[0] end"
    assert sum(line.count("x") for line in lines) == 200_000


def test_what_nobody_reads_ends_all() -> None:
    """L1: as with `zpccl launch ... | head -1`."""
    program = "while true; do echo line; sleep 0.02; done"
    with launch("-n", "2", "--", "bash", "-c", program) as process:
        list(lines_until(process, "line", 1))
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(HANG_SECONDS) == 128 + signal.SIGPIPE


def test_ctrl_c_while_nobody_reads_the_output() -> None:
    """L1: as with `zpccl launch ... | less`, when the pipe between them is full."""
    page = os.sysconf("SC_PAGE_SIZE")
    line = "x" * (page - len("[0] \n"))
    with launch("-n", "2", "--", "bash", "-c", f"while true; do echo {line}; done") as process:
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        assert fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, page) == page
        until(lambda: fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)) == page.to_bytes(4, sys.byteorder), "it is full")
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(HANG_SECONDS) == 130
        finally:
            process.kill()


def test_a_closed_output() -> None:
    """As in `zpccl launch ... >&-`: the processes run, and their output goes nowhere."""
    command = [sys.executable, "-m", "zpccl", "launch", "-n", "1", "--master", "127.0.0.1:1", "--"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command, "sh", "-c", "echo hi; exit 3"], stderr=subprocess.PIPE
    )
    assert (done.returncode, done.stderr) == (3, b"")


def test_who_goes_on_writing_after_its_parent_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L1: a program leaves a process behind, which writes more quickly than the launcher reads."""
    read = os.read

    def read_and_refill(descriptor: int, size: int) -> bytes:
        data = read(descriptor, size)
        if data:
            Path(f"/proc/self/fd/{descriptor}").write_bytes(b"more\n")
        return data

    monkeypatch.setattr(os, "read", read_and_refill)
    with (tmp_path / "output").open("wb") as output:
        assert Launcher(["sh", "-c", "echo once; exit 3"], 1, "example.org:1", Chaos(), output).run() == 3
    written = (tmp_path / "output").read_bytes()
    assert written.startswith(b"[0] once\n") and b"status 3" in written


def test_the_end_of_the_terminal_ends_all() -> None:
    """Programs have their own sessions, so it does not reach them."""
    with launch("-n", "2", "--", "bash", "-c", WAITS.format("HUP")) as process:
        list(lines_until(process, "ready", 2))
        process.send_signal(signal.SIGHUP)
        output, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 129
    assert output.count("interrupted") == 2


@pytest.mark.parametrize(
    "number, again", [(signal.SIGINT, None), (signal.SIGHUP, None), (signal.SIGHUP, signal.SIGHUP)]
)
def test_the_end_of_the_reader_or_terminal_is_no_second_signal(
    tmp_path: Path, number: signal.Signals, again: signal.Signals | None
) -> None:
    """Ctrl-C also ends `tee`. A terminal that closes causes EIO, and signals from the kernel and the shell."""
    program = "trap 'echo ends; sleep 0.5; touch $0/$RANK; exit' INT HUP; echo ready; while true; do sleep 0.02; done"
    with launch("-n", "2", "--", "bash", "-c", program, str(tmp_path)) as process:
        list(lines_until(process, "ready", 2))
        process.send_signal(number)
        if again is None:
            assert process.stdout is not None
            process.stdout.close()
        else:
            list(lines_until(process, "ends", 2))
            process.send_signal(again)
        assert process.wait(HANG_SECONDS) == 128 + number
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_under_nohup_the_end_of_the_terminal_is_nothing(tmp_path: Path) -> None:
    program = f"echo ready; while ! [ -e {tmp_path}/go ]; do sleep 0.02; done"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with launch("-n", "1", "--", "bash", "-c", program) as process:
            list(lines_until(process, "ready", 1))
            process.send_signal(signal.SIGHUP)
            (tmp_path / "go").touch()
            assert process.wait(HANG_SECONDS) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_chaos_is_parsed() -> None:
    assert parse_chaos("kill=30s,join=1.5m") == Chaos(30, 90)
    assert parse_chaos(" join=45") == Chaos(None, 45)
    for text in ("kill", "kill=0s", "kill=-1s", "kill=1s,kill=2s", "stop=1s", "kill=1h", "kill=99999999999s", ""):
        with pytest.raises(InvalidArgument):
            parse_chaos(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "2"], "no program"),
        (["-n", "0", "--", "true"], "-n 0 is not"),
        (["-n", "1", "--", "/nowhere/program"], "cannot start /nowhere/program: No such file or directory\n"),
        (["-n", "1", "--", "train.py"], "cannot start train.py: No such file or directory; to run it with Python: "),
        (["-n", "1", "--master", "nowhere", "--", "true"], "master address 'nowhere'"),
        (["-n", "1", "--chaos", "all", "--", "true"], "kill=30s"),
    ],
)
def test_what_cannot_be_launched(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *arguments]) == 2
    assert message in capsys.readouterr().err
