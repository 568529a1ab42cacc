"""The link: two namespaces that are really apart, at the rate that was asked, and gone with their maker."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvlab.errors import BadInput, RunFailed
from kvlab.params import Arm
from kvlab.placement import link as links
from kvlab.placement.link import IFACE, Flow, Link, flows_of

SS = """\
ESTAB 0      0           10.77.0.1:42903      10.77.0.1:45783 users:(("python",pid=18596,fd=34))
\t bbr wscale:10,7 rto:204 rtt:5.27/2.6 mss:65483 cwnd:12 bytes_sent:108 bytes_acked:108 rcv_space:65483
ESTAB 0      131072      10.77.0.1:35649      10.77.0.2:57249 users:(("python",pid=7,fd=9))
\t cubic wscale:10,10 rto:204 rtt:0.328/0.02 cwnd:202 ssthresh:150 bytes_sent:1140954250 bytes_retrans:60816 \
bytes_acked:1140893434 segs_out:9 retrans:1/42 lost:2 rcv_rtt:1
"""


def test_ss_details_belong_to_the_line_above():
    small, big = flows_of(SS)
    assert big == Flow(
        local="10.77.0.1:35649",
        peer="10.77.0.2:57249",
        pid=7,
        congestion="cubic",
        cwnd=202,
        retransmits=42,
        bytes_sent=1140954250,
        bytes_retransmitted=60816,
        rtt_ms=0.328,
        window_scale="10,10",
    )
    # rtt is not rcv_rtt, and a connection that lost nothing has no retrans field.
    assert (small.rtt_ms, small.retransmits, small.window_scale, small.pid) == (5.27, 0, "10,7", 18596)
    assert flows_of("") == [] and flows_of("\n") == []


def test_without_the_tools_it_is_loopback_and_says_why(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with Link(5) as link:
        assert link.kind == "loopback" and "iproute2" in link.reason and link.rate_gbps is None
        assert link.places[0].prefix == () and link.places[0].address == "127.0.0.1"
        with pytest.raises(RunFailed, match="iproute2"):
            link.set_rate(1)
    with pytest.raises(BadInput, match=r"no shaped link on this machine: .*iproute2"):
        Link(5, fallback=False).__enter__()


def test_a_refused_namespace_is_loopback_and_says_why(monkeypatch):
    def refuse(self, how):
        return hold(self, [*how[:1], "--no-such-flag"])

    hold = Link._hold
    monkeypatch.setattr(Link, "_hold", refuse)
    monkeypatch.setattr(links, "_TOOLS", ("sh",))
    with Link() as link:
        assert link.kind == "loopback" and "not allowed here" in link.reason and link._holders == []


@pytest.fixture
def link():
    with Link() as made:
        if made.kind != "veth":
            pytest.skip(f"no link on this machine: {made.reason}")
        yield made


def said(place, *words, **more):
    return subprocess.run([*place.prefix, *words], capture_output=True, text=True, check=True, **more).stdout


@pytest.mark.live
def test_each_place_sees_its_own_interface_under_the_same_name(link, tmp_path):
    for number, place in enumerate(link.places):
        assert f"10.77.0.{number + 1}/30" in said(place, "ip", "-o", "addr")
        assert set(said(place, "ls", "/sys/class/net").split()) >= {"lo", IFACE}
        assert place.env["UCX_NET_DEVICES"] == IFACE
        # A process stays where it was started, and is the child of who started it.
        assert said(place, "pwd", cwd=tmp_path).strip() == str(tmp_path)
        assert said(place, "sh", "-c", "echo $PPID").strip() == str(os.getpid())
    assert not Path("/sys/class/net", IFACE).exists(), "nothing of it is seen outside"


SEND = """
import socket, sys
s = socket.create_server((sys.argv[1], 0))
print(s.getsockname()[1], flush=True)
for c in [s.accept()[0] for _ in range(int(sys.argv[3]))]:
    c.setblocking(True)
    __import__("threading").Thread(target=lambda c=c: (c.sendall(bytes(int(sys.argv[2]))), c.close())).start()
"""
TAKE = """
import selectors, socket, sys, time
q, n, t = selectors.DefaultSelector(), 0, time.perf_counter()
for _ in range(int(sys.argv[3])):
    q.register(socket.create_connection((sys.argv[1], int(sys.argv[2]))), selectors.EVENT_READ)
while q.get_map():
    for k, _ in q.select():
        m = len(k.fileobj.recv(1 << 20))
        n += m
        m or q.unregister(k.fileobj)
print(n * 8e-9 / (time.perf_counter() - t))
"""


def gbps(link, size, streams=1):
    """Rate of ``streams`` plain connections, dialled from the second place, of ``size`` bytes each."""
    (a, b), python = link.places, [sys.executable, "-c"]
    words = [*a.prefix, *python, SEND, a.address, str(size), str(streams)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as sender:
        return float(said(b, *python, TAKE, a.address, sender.stdout.readline().strip(), str(streams), timeout=60))


@pytest.mark.live
def test_no_flow_is_faster_than_the_rate_and_the_rate_changes_live(link):
    link.set_rate(0.2)
    assert 0.1 < gbps(link, 20_000_000) < 0.21
    link.set_rate(0.1)
    assert 0.05 < gbps(link, 10_000_000) < 0.105
    link.set_rate(None)
    assert gbps(link, 50_000_000) > 0.5
    with pytest.raises(BadInput, match="cannot be set"):
        link.set_rate(-1)


@pytest.mark.live
def test_a_cap_per_flow_lets_four_connections_take_more_than_one(link):
    link.set_rate(0.1, per_flow=True)
    assert gbps(link, 5_000_000) < 0.105
    # Four ports of 256 buckets share one in 1 of 43 tries, and then three caps' worth or a little less must still pass.
    assert 0.15 < gbps(link, 5_000_000, streams=4) < 0.42


@pytest.mark.live
def test_two_links_at_once_have_the_same_addresses_and_do_not_meet(link):
    with Link(1) as other:
        assert [p.address for p in other.places] == [p.address for p in link.places]
        assert gbps(other, 1_000_000) > 0 and gbps(link, 1_000_000) > 0


MAKER = """
import os, sys, time
from pathlib import Path
from kvlab.placement import local
from kvlab.placement.link import Link

with Link(1, per_flow=True) as link:
    if link.kind != "veth":
        sys.exit(print(link.reason))
    child = "import sys, time; from kvlab.placement import local; local.die_with_parent(); time.sleep(300)"
    inside = local.start(local.python("-c", child), env=os.environ, log=Path("inside.log"), place=link.places[0])
    time.sleep(1)
    print("veth", inside.pid, *(h.pid for h in link._holders), flush=True)
    time.sleep(300)
"""


def gone(pid, within_s=10):
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            # An orphan that nobody has waited for yet holds nothing any more.
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.live
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_killed_maker(how, tmp_path):
    root = str(Path(links.__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root}
    with subprocess.Popen([sys.executable, "-c", MAKER], stdout=-1, env=env, cwd=tmp_path) as maker:
        kind, *pids = maker.stdout.readline().decode().split()
        if kind != "veth":
            pytest.skip("no link on this machine")
        spaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
        assert len(spaces) == 2 and os.readlink("/proc/self/ns/net") not in spaces
        maker.send_signal(how)
        maker.wait(10)
    assert all(gone(pid) for pid in pids)
    # A namespace without a name, a process or an open descriptor does not exist any more.
    left = set()
    for entry in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            left.add(os.readlink(entry))
        except OSError:
            continue
    assert not spaces & left


@pytest.mark.live
def test_a_pull_crosses_the_link_and_the_senders_connection_is_found(link, tmp_path):
    pytest.importorskip("nixl")
    from kvlab.pull import Case, Options, Pair

    case = Case("x", ((64, 65536),))
    with Pair(Arm(label="a", env={"UCX_TLS": "tcp"}), Options(), [case], tmp_path, places=link.places) as pair:
        assert pair.pull(case, verify=True)[0]["verified"]
        assert pair.socket_limit(1 << 20) > 0
        sent = [f for f in link.flows(0, pair.pid("target")) if f.bytes_sent > case.bytes]
        assert len(sent) == 1 and sent[0].peer.startswith("10.77.0.2:") and sent[0].congestion
