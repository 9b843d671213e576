"""Several machines in one: each has its own network, its own processes, and the folders where Ray keeps its sockets.

They are namespaces of Linux at a bridge, which this machine is at too. Cables can be pulled.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tests.processes import children

NETWORK = "198.18.77"
"""Of those for measurements of networks, which no machine outside has."""
OWN_FOLDERS = "/tmp/ray /tmp/haproxy-serve /dev/shm"
BEGIN = f"for folder in {OWN_FOLDERS}; do mkdir -p $folder && mount -t tmpfs none $folder || exit; done"


def can_have_hosts() -> bool:
    """It takes root, and a kernel that lets root do so."""
    tools = all(shutil.which(name) for name in ("ip", "unshare", "nsenter", "setpriv"))
    return tools and os.geteuid() == 0 and subprocess.run(["unshare", "-n", "-m", "-p", "-f", "true"]).returncode == 0


@dataclass(frozen=True)
class Host:
    number: int
    pid: int
    cable: str

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    def command(self, *words: str) -> list[str]:
        """What runs `words` there."""
        return ["nsenter", "-t", str(self.pid), "-a", *words]

    def titles(self) -> list[str]:
        """Of all programs there."""
        listed = subprocess.run(self.command("ps", "ax", "-o", "args"), capture_output=True, text=True, check=True)
        return listed.stdout.splitlines()

    def set_cable(self, is_in: bool) -> None:
        _ip("link", "set", self.cable, "up" if is_in else "down")


@contextmanager
def hosts(number: int) -> Iterator[Sequence[Host]]:
    """Everything that runs on them ends with them."""
    bridge = f"kb{os.getpid()}"
    _ip("link", "add", bridge, "type", "bridge")
    running: list[subprocess.Popen[bytes]] = []
    try:
        _ip("addr", "add", f"{NETWORK}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        yield [_host(at, bridge, running) for at in range(1, number + 1)]
    finally:
        for process in running:
            process.kill()
            process.wait()
        _ip("link", "del", bridge)


def _host(number: int, bridge: str, running: list[subprocess.Popen[bytes]]) -> Host:
    script = f"{BEGIN}; ip link set lo up; echo; exec sleep infinity"
    namespaces = ["unshare", "-n", "-m", "-p", "-f", "--kill-child", "--mount-proc"]
    words = ["setpriv", "--pdeathsig", "KILL", *namespaces, "sh", "-c", script]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    running.append(process)
    assert process.stdout is not None
    with process.stdout as out:
        assert out.readline(), "a host did not begin"
    (pid,) = children(process.pid)
    host = Host(number, pid, f"k{number}v{os.getpid()}")
    _ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    _ip("link", "set", host.cable, "master", bridge)
    host.set_cable(is_in=True)
    for words in (("addr", "add", f"{host.address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
        subprocess.run(["nsenter", "-t", str(pid), "-n", "ip", *words], check=True)
    return host


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
