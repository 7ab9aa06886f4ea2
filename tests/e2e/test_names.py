"""Masters whose name has addresses of both IP versions, as localhost has on many systems.

Linux, as root: each program has its own /etc/hosts and network.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.harness import HANG_SECONDS

pytestmark = pytest.mark.e2e

HOSTS = "127.0.0.1 both four\n::1 both six\n192.0.2.1 far\n::1 far\n"
ENTER = 'ip link set lo up && ip route add blackhole 192.0.2.1 && mount --bind "$0" /etc/hosts && exec "$@"'
PEER = """
import sys, zpccl
with zpccl.MasterNode(sys.argv[1], recovery_grace=0) as master:
    host = sys.argv[2]
    with zpccl.Communicator(f"{host}:{master.address.rpartition(':')[2]}") as comm:
        print(comm.world_size)
"""
AGAIN = """
import sys, zpccl
master = zpccl.MasterNode(sys.argv[1], recovery_grace=0)
master.run()
address = master.address
with zpccl.Communicator(f"{sys.argv[2]}:{address.rpartition(':')[2]}") as comm:
    master.interrupt()
    with zpccl.MasterNode(address):
        print(comm.are_peers_pending(), comm.epoch)
        comm.close()
"""
DOCTOR = """
import sys, zpccl
from zpccl.cli.main import main
with zpccl.MasterNode(sys.argv[1], recovery_grace=0) as master:
    host = sys.argv[2]
    main(["doctor", "--json", "--master", f"{host}:{master.address.rpartition(':')[2]}"])
"""


def run(program: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program in which names have the addresses of HOSTS. Skips the test if this process cannot do so."""
    hosts = folder / "hosts"
    hosts.write_text(HOSTS)
    enter = ["unshare", "--mount", "--net", "sh", "-c", ENTER, str(hosts)]
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces can be made")
    command = [*enter, sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)


WHERE = pytest.mark.parametrize(
    ("listen", "host"),
    [("0.0.0.0:0", "both"), ("[::1]:0", "both"), ("0.0.0.0:0", "four"), ("[::]:0", "six")],
    ids=["IPv4 of both", "IPv6 of both", "IPv4", "IPv6"],
)


@WHERE
def test_a_peer_reaches_a_master_by_its_name(tmp_path: Path, listen: str, host: str) -> None:
    """The master may listen at any of the addresses of the name; by default it listens at those of IPv4."""
    done = run(PEER, listen, host, folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@WHERE
def test_a_peer_comes_back_to_it(tmp_path: Path, listen: str, host: str) -> None:
    """The peer comes back when the master is started again."""
    done = run(AGAIN, listen, host, folder=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("False "), done.stderr


@WHERE
def test_the_doctor_does(tmp_path: Path, listen: str, host: str) -> None:
    done = run(DOCTOR, listen, host, folder=tmp_path)
    found = {found["check"]: found for found in json.loads(done.stdout)["findings"]}
    assert (found["master"]["level"], found["data port"]["level"]) == ("ok", "ok"), found


def test_a_name_at_which_nobody_listens(tmp_path: Path) -> None:
    """Both addresses fail: connect() raises an error and does not loop."""
    done = run(PEER, "127.0.0.2:0", "far", folder=tmp_path)
    assert done.returncode == 1 and "MasterUnreachable" in done.stderr and "nobody answers" in done.stderr
