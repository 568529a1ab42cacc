"""A network link on one machine: two network namespaces, a veth pair between them, an optional rate.

The namespaces have no names.  Each is held open by a small process that waits on its standard input, whose
other end only kvlab has: when kvlab ends in whatever way, SIGKILL included, the kernel closes that pipe, the
holder ends, and the namespace goes with its last process, taking the veth pair and the shaping along.
Two runs share no name, and both use the same addresses.

Both sides' interface has the same name, and UCX_NET_DEVICES is set to it: otherwise UCX takes ``lo`` for a
peer of the same machine and the metadata load fails.  UCX finds interfaces in /sys, which shows the namespace
it was mounted from, so each process that joins gets a mount namespace with a /sys of its own.  As root the
namespaces are plain ones, else they are made in a user namespace; where neither is allowed the places are
loopback, and ``reason`` says why.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

from kvlab.errors import BadInput, RunFailed
from kvlab.placement import local

IFACE = "kv0"
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_TOOLS = ("ip", "tc", "unshare", "nsenter")
_OWN_SYS = ("unshare", "--mount", "sh", "-c", 'mount -t sysfs sysfs /sys && exec "$@"', "sh")
#: hash buckets of the per-flow cap: that many flows at most are told apart, two of four collide in 2 of 100 runs
_FLOWS = 256


@dataclass(frozen=True)
class Flow:
    """One TCP connection as ``ss -ti`` shows it: addresses, owner, congestion state, retransmits."""

    local: str
    peer: str
    pid: int | None
    congestion: str
    cwnd: int
    retransmits: int
    bytes_sent: int
    bytes_retransmitted: int
    rtt_ms: float
    window_scale: str


def flows_of(text: str) -> list[Flow]:
    """Read the output of ``ss -tinpH``; fields that a kernel leaves out are 0 or empty."""
    found = []
    # A connection is one line, its details follow on lines that start with a blank.
    for block in re.split(r"\n(?=\S)", text.strip()):
        head, _, rest = block.partition("\n")
        words = head.split()
        if len(words) < 5:
            continue
        pid = re.search(r"pid=(\d+)", head)

        def field(pattern: str, rest: str = rest) -> str:
            match = re.search(rf"(?:^|\s){pattern}", rest)
            return match[1] if match else ""

        found.append(
            Flow(
                local=words[3],
                peer=words[4],
                pid=int(pid[1]) if pid else None,
                congestion=field(r"(bbr|cubic|reno|dctcp|vegas|htcp|westwood)\b"),
                cwnd=int(field(r"cwnd:(\d+)") or 0),
                retransmits=int(field(r"retrans:\d+/(\d+)") or 0),
                bytes_sent=int(field(r"bytes_sent:(\d+)") or 0),
                bytes_retransmitted=int(field(r"bytes_retrans:(\d+)") or 0),
                rtt_ms=float(field(r"rtt:([\d.]+)") or 0),
                window_scale=field(r"wscale:(\d+,\d+)"),
            )
        )
    return found


class Link:
    """Two places with a link between them: ``with Link(4.97) as link: Pair(..., places=link.places)``.

    :param rate_gbps: cap in 10^9 bit/s, on each direction, Ethernet headers included; None: no cap
    :param per_flow: the cap holds for each TCP connection, as clouds cap a flow, not for all together;
        connections are told apart by their port at the second place
    :param fallback: where no link can be made take loopback, unshaped; False raises BadInput instead

    Inside, ``kind`` is ``veth`` or ``loopback``, and ``reason`` says why loopback; of ``places`` the first is
    for the target (prefill engine), the second for the initiator (decode engine).
    """

    def __init__(self, rate_gbps: float | None = None, *, per_flow: bool = False, fallback: bool = True) -> None:
        self.rate_gbps, self.per_flow, self.fallback = rate_gbps, per_flow, fallback
        self.kind, self.reason = "loopback", ""
        here = local.Place("loopback", env={"UCX_NET_DEVICES": "lo"})
        self.places: tuple[local.Place, local.Place] = (here, here)
        self._holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Link:
        try:
            self._make()
        except RunFailed as error:
            self.close()
            self.reason = str(error)
            if not self.fallback:
                raise BadInput(f"no shaped link on this machine: {error}") from None
            self.rate_gbps = None
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the namespaces go; they vanish with the last process in them.  Safe to call twice."""
        for holder in self._holders:
            assert holder.stdin and holder.stdout
            holder.stdin.close()
            holder.stdout.close()
            local.stop(holder, 2)
        self._holders = []

    def set_rate(self, rate_gbps: float | None, per_flow: bool | None = None) -> None:
        """Change the rate (and, unless None, what it caps) while connections live; RunFailed on loopback."""
        if self.kind != "veth":
            raise RunFailed(f"the rate of loopback cannot be set ({self.reason})")
        if rate_gbps is not None and not 0.001 <= rate_gbps <= 400:
            raise BadInput(f"a link rate of {rate_gbps} Gbps cannot be set; 0.001 to 400 can, and None for no cap")
        self.rate_gbps, self.per_flow = rate_gbps, self.per_flow if per_flow is None else per_flow
        for number, place in enumerate(self.places):
            # Fails when there was no rate, which is as well.
            _run([*place.prefix, "tc", "qdisc", "del", "dev", IFACE, "root"], check=False)
            if rate_gbps is not None:
                _run([*place.prefix, "tc", "-batch", "-"], _shaping(rate_gbps, self.per_flow, number))

    def flows(self, side: int, pid: int | None = None) -> list[Flow]:
        """Return the TCP connections of ``places[side]``, of one process when ``pid`` is given."""
        if not shutil.which("ss"):
            return []
        found = flows_of(_run([*self.places[side].prefix, "ss", "-tinpH"]))
        return [f for f in found if pid is None or f.pid == pid]

    def _make(self) -> None:
        missing = [t for t in _TOOLS if not shutil.which(t)]
        if missing:
            raise RunFailed(f"{', '.join(missing)} not found (packages iproute2 and util-linux)")
        root = os.geteuid() == 0
        first = self._hold(["unshare", "--net"] if root else ["unshare", "--user", "--map-root-user", "--net"])
        join = [] if root else [f"--user=/proc/{first}/ns/user", "--preserve-credentials"]
        second = self._hold(["unshare", "--net"] if root else ["nsenter", *join, "unshare", "--net"])
        pids = (first, second)
        prefixes = [("nsenter", *join, f"--net=/proc/{pid}/ns/net", *_OWN_SYS) for pid in pids]
        _run([*prefixes[0], *f"ip link add {IFACE} type veth peer name {IFACE} netns {second}".split()])
        places = []
        for prefix, address in zip(prefixes, _ADDRESSES, strict=True):
            commands = f"link set lo up\naddr add {address}/30 dev {IFACE}\nlink set {IFACE} up\n"
            _run([*prefix, "ip", "-batch", "-"], commands)
            places.append(local.Place(f"{IFACE} {address}", prefix, {"UCX_NET_DEVICES": IFACE}, address))
        self.places, self.kind = (places[0], places[1]), "veth"
        if self.rate_gbps is not None:
            self.set_rate(self.rate_gbps)

    def _hold(self, how: list[str]) -> int:
        """Start a process that holds a new namespace until its standard input closes; return its id."""
        pipe = subprocess.PIPE
        holder = subprocess.Popen(
            [*how, "sh", "-c", "echo up && exec cat"], stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._holders.append(holder)
        assert holder.stdout
        said = holder.stdout.readline().decode(errors="replace").strip()
        if said != "up":
            raise RunFailed(f"a network namespace is not allowed here ({said or 'no reason given'})")
        return holder.pid


def _run(argv: list[str], text: str = "", *, check: bool = True) -> str:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False, timeout=20)
    if check and done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:200]
        raise RunFailed(f"{' '.join(argv[argv.index('--') + 1 if '--' in argv else 0 :])[:120]}: {said}")
    return done.stdout


def _shaping(rate_gbps: float, per_flow: bool, side: int) -> str:
    """Return tc commands for one side: one bucket for all, or a class for each initiator port (hashed)."""
    rate, burst = f"{rate_gbps * 1e9:.0f}bit", max(64 * 1024, int(rate_gbps * 1e9 / 8 * 0.0005))
    if not per_flow:
        return f"qdisc add dev {IFACE} root tbf rate {rate} burst {burst} latency 20ms\n"
    # The low byte of the port at the second place: of the destination port in what the first place sends,
    # of the source port here (the word after 20 bytes of IP).  UCX has one there for each worker.
    mask = "0x000000ff" if side == 0 else "0x00ff0000"
    lines = [f"qdisc add dev {IFACE} root handle 1: htb default 1"]
    add = f"filter add dev {IFACE} parent 1: protocol ip prio 1"
    lines += [f"{add} handle 2: u32 divisor {_FLOWS}"]
    for n in range(_FLOWS):
        lines += [f"class add dev {IFACE} parent 1: classid 1:{n + 1:x} htb rate {rate} burst {burst} cburst {burst}"]
        lines += [f"{add} u32 ht 2:{n:x}: match u32 0 0 flowid 1:{n + 1:x}"]
    lines += [f"{add} u32 ht 800:: match u32 0 0 hashkey mask {mask} at 20 link 2:"]
    return "\n".join(lines) + "\n"
