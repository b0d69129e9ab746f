"""A real Slurm on this machine: munged, slurmctld, and one slurmd a node, each in network, UTS and mount namespaces.

Every node so has a host name, an address and an /etc/hosts of its own, as launchers expect, while all see one disk.
Debian's slurm-wlm, munge and iproute2 and root are what it takes; no systemd, nothing below /etc, /run/munge or /var.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

SUBNET, BRIDGE = "10.231.7", "dmjdslurm"
NETNS = "dmjdslurm-{}"
FREEZER = Path("/sys/fs/cgroup/freezer")
LOCK = Path("/run/lock/dmjd-slurm.lock")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "ip", "nsenter", "unshare", "setpriv")
DEBIAN = "slurm-wlm munge iproute2 util-linux"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

CONF = """
ClusterName=dmjd
SlurmctldHost={host}({subnet}.254)
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
JobRequeue=1
KillWait=20
MinJobAge=600
SlurmdTimeout=15
MessageTimeout=10
"""


class Unavailable(Exception):
    """This machine lets nobody start such a Slurm; the exact reason."""


def _check_machine() -> None:
    """Ask beforehand for what is often not allowed in a container. Raises Unavailable."""
    if os.geteuid() != 0:
        raise Unavailable("a Slurm with nodes in namespaces needs root")
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        raise Unavailable(f"no {', '.join(absent)}: apt-get install {DEBIAN}")
    for command in (
        ["unshare", "--net", "--uts", "--mount", "mount", "--bind", "/etc/hosts", "/etc/hosts"],
        ["unshare", "--net", "ip", "link", "add", BRIDGE, "type", "bridge"],
        ["unshare", "--net", "ip", "link", "add", "dmjd0", "type", "veth", "peer", "name", "eth0"],
    ):
        probe = subprocess.run(command, env={**os.environ, "PATH": _path()}, capture_output=True, text=True)
        if probe.returncode:
            raise Unavailable(f"`{' '.join(command)}` is not allowed here: {probe.stderr.strip()}")


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


@dataclass
class Cluster:
    """Nodes ``n1`` ... of one partition, and what tests do with jobs on them.

    proctrack: cgroup, as on production clusters, where cgroup v1 is mounted. There a signal to a step reaches its
        tasks alone; with linuxproc, the fallback, every process below them gets it too.
    """

    root: Path
    nodes: int
    cpus: int
    gpus: int
    proctrack: str
    slurmd: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)
    delayed: dict[str, float] = field(default_factory=dict)
    """Jobs that have been requeued and may not start yet, and when they were first seen so."""

    @property
    def environment(self) -> dict[str, str]:
        """For processes that talk to this cluster. Of the variables of a Slurm around us none is left."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        return {**kept, "PATH": _path(), "SLURM_CONF": str(self.root / "slurm.conf")}

    def __call__(self, *command: str | Path, **environment: str) -> str:
        """What a Slurm command says. On a busy machine its controller is now and then too slow to answer."""
        for _ in range(5):
            done = subprocess.run(
                [*map(str, command)],
                env={**self.environment, **environment},
                capture_output=True,
                text=True,
                timeout=60,
            )
            silent = not done.stderr.strip() or re.search(r"Zero Bytes|nable to contact|timed out", done.stderr)
            if done.returncode == 0 or not silent:
                break
            time.sleep(1)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def start_node(self, name: str) -> None:
        """Start a node's slurmd, in namespaces that stay."""
        # Not `ip netns exec`: it remounts /sys, and slurmd then finds no cgroups.
        inside = f"mount --bind {self.root}/hosts /etc/hosts; hostname {name}; exec slurmd -D -f {self.root}/slurm.conf"
        command = [
            "nsenter",
            f"--net=/run/netns/{NETNS.format(name)}",
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-c",
            inside,
        ]
        self.slurmd[name] = self._daemon(command)

    def _daemon(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.root / "daemons.log").open("ab") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # an interrupt at the keyboard is for pytest, which then takes it all down
            )
        self.daemons.append(process)
        return process

    def kill_node(self, name: str) -> None:
        """Everything on the node dies at once, as in a power cut."""
        pids = self.processes_of(name)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # else the batch script acts on the death of its srun
            for pid in pids:
                _kill(pid, number)
        self.slurmd.pop(name).wait(timeout=30)

    def kill_slurmd(self, name: str) -> None:
        """The node's daemon dies alone. What it started goes on without it."""
        self.slurmd[name].kill()
        self.slurmd.pop(name).wait(timeout=30)

    def processes_of(self, name: str) -> list[int]:
        """Process ids on the node."""
        found = subprocess.run(
            ["ip", "netns", "pids", NETNS.format(name)], env=self.environment, capture_output=True, text=True
        )
        return [int(pid) for pid in found.stdout.split()]

    def ranks(self, name: str) -> list[int]:
        """Process ids of the training processes on the node."""
        found = []
        for pid in self.processes_of(name):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                environment = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            if b"\0RANK=" in environment and b"pretrain" in words:
                found.append(pid)
        return found

    def ranks_anywhere(self) -> list[int]:
        """Process ids of the training processes on all nodes."""
        return [pid for name in self.slurmd for pid in self.ranks(name)]

    def nodes_of(self, job: str) -> list[str]:
        """Names of the nodes a job runs on."""
        return self("scontrol", "show", "hostnames", self.job(job)["NodeList"]).split()

    def submit(self, *words: str | Path, **environment: str) -> str:
        """Submit a job and return its id."""
        return self("sbatch", "--parsable", *words, **environment).split(";")[0]

    def job(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self("scontrol", "show", "job", job)))

    def state(self, job: str) -> str:
        return self.job(job)["JobState"]

    def wait(self, job: str, until: Callable[[], bool] | None = None, seconds: float = 300) -> str:
        """The state of a job that has ended, or when ``until`` holds. No job waits two minutes for its requeue."""

        def over() -> bool:
            self._cut_delays()
            return self.state(job) in ENDED or (until is not None and until())

        self.wait_until(over, seconds, lambda: str(self.job(job)))
        return self.state(job)

    def _cut_delays(self) -> None:
        listed = self("squeue", "--noheader", "--array", "--states=PENDING", "--format=%i %r").splitlines()
        delayed = [job for job, _, reason in (line.partition(" ") for line in listed) if reason == "BeginTime"]
        self.delayed = {job: self.delayed.get(job, time.monotonic()) for job in delayed}
        for job, since in self.delayed.items():
            if time.monotonic() - since > 2:  # any sooner, and slurmd may take it for the launch that was revoked
                self("scontrol", "update", f"JobId={job}", "StartTime=now")

    def wait_until(
        self, holds: Callable[[], bool], seconds: float = 30, story: Callable[[], str] = lambda: "what is waited for"
    ) -> None:
        """Look every now and then whether something holds; fail if it does not in time."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, f"{story()} after {seconds} s\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        """The last lines of every daemon."""
        return "\n".join(
            f"{log.name}: " + "\n".join(log.read_text().splitlines()[-5:]) for log in self.root.glob("*.log")
        )


@contextmanager
def cluster(root: Path, nodes: int = 2, cpus: int = 2, memory: int = 8000, gpus: int = 0) -> Iterator[Cluster]:
    """A cluster that is up within, and gone after, however that comes. Nodes may have more than this machine has.

    One at a time on a machine: its bridge, its nodes' namespaces and their cgroups have fixed names. What a killed
    process left of another is cleared away first.

    Raises:
        Unavailable: where it cannot be started, with the words of whoever refused.
    """
    _check_machine()
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = Cluster(root, nodes, cpus, gpus, "cgroup" if FREEZER.is_dir() else "linuxproc")
        _clear(made)
        try:
            try:
                _start(made, memory)
            except (AssertionError, OSError) as error:
                raise Unavailable(f"Slurm does not start here: {error}") from error
            yield made
        finally:
            _clear(made)


def _start(made: Cluster, memory: int) -> None:
    root, names = made.root, [f"n{number + 1}" for number in range(made.nodes)]
    for folder in ("state", "spool", "dev", *(f"spool/{name}" for name in names)):
        (root / folder).mkdir(parents=True, exist_ok=True)
    root.chmod(0o755)
    host = os.uname().nodename.split(".")[0]
    addresses = [f"{SUBNET}.{number + 1} {name}" for number, name in enumerate(names)]
    (root / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"{SUBNET}.254 {host}", *addresses]) + "\n")
    gres = f"Gres=gpu:{made.gpus}" if made.gpus else ""
    hardware = f"CPUs={made.cpus} RealMemory={memory} {gres} State=UNKNOWN"
    lines = [f"NodeName={name} NodeAddr={SUBNET}.{number + 1} {hardware}" for number, name in enumerate(names)]
    lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    conf = CONF.format(host=host, subnet=SUBNET, root=root, proctrack=made.proctrack)
    (root / "slurm.conf").write_text(conf + "\n".join(lines) + "\n")
    if made.proctrack == "cgroup":
        mount = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\n"
        (root / "cgroup.conf").write_text(mount)
    (root / "gres.conf").write_text(_fake_gpus(root, made) if made.gpus else "")
    key = root / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    places = {"key": key.name, "socket": "munge.sock", "pid": "munged.pid", "log": "munged.log", "seed": "munge.seed"}
    flags = [f"--{name}{'' if name == 'socket' else '-file'}={root / place}" for name, place in places.items()]
    made._daemon(["munged", "--foreground", "--force", "--num-threads=2", *flags])
    made.wait_until((root / "munge.sock").exists, story=lambda: "no munged")
    _ip(made, f"link add {BRIDGE} type bridge", f"addr add {SUBNET}.254/24 dev {BRIDGE}", f"link set {BRIDGE} up")
    made._daemon(["slurmctld", "-D", "-f", str(root / "slurm.conf")])
    for number, name in enumerate(names):
        space = NETNS.format(name)
        _ip(
            made,
            f"netns add {space}",
            f"link add dmjd{name} type veth peer name eth0 netns {space}",
            f"link set dmjd{name} master {BRIDGE} up",
            f"-n {space} addr add {SUBNET}.{number + 1}/24 dev eth0",
            f"-n {space} link set eth0 up",
            f"-n {space} link set lo up",
        )
        made.start_node(name)
    idle = ["sinfo", "-h", "-t", "idle", "-o", "%D"]

    def all_idle() -> bool:
        told = subprocess.run(idle, env=made.environment, capture_output=True, text=True, timeout=60)
        return told.stdout.strip() == str(made.nodes)

    made.wait_until(all_idle, seconds=60, story=lambda: f"no {made.nodes} idle nodes")


def _fake_gpus(root: Path, made: Cluster) -> str:
    # A count without device files would not do: slurmd then reports none, and the node is invalid.
    for number in range(made.gpus):
        os.mknod(root / "dev" / f"gpu{number}", 0o666 | 0o020000, os.makedev(1, 3))
    return f"NodeName=n[1-{made.nodes}] Name=gpu File={root}/dev/gpu[0-{made.gpus - 1}]\n"


def _ip(made: Cluster, *lines: str) -> None:
    for line in lines:
        made("ip", *line.split())


def _kill(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _clear(made: Cluster) -> None:
    """Take down whatever is up, of this cluster or of one that was not taken down."""
    listed = subprocess.run(["ip", "netns", "list"], env=made.environment, capture_output=True, text=True).stdout
    names = re.findall(rf"^{NETNS.format('')}(\w+)", listed, re.MULTILINE)
    # Daemons first, which would start what is then missed.
    for daemon in made.daemons:
        daemon.kill()
    for daemon in made.daemons:
        daemon.wait(timeout=30)
    made.daemons.clear()
    for name in names:
        top = FREEZER / f"slurm_{name}"
        for frozen in top.rglob("freezer.state"):  # slurmd freezes a step to signal it; a frozen process cannot die
            frozen.write_text("THAWED")
        # A killed process takes a while to go, and may have forked in its last moment.
        end = time.monotonic() + 30
        while (pids := made.processes_of(name)) and time.monotonic() < end:
            for pid in pids:
                _kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for what in (["netns", "del", NETNS.format(name)], ["link", "del", f"dmjd{name}"]):
            subprocess.run(["ip", *what], env=made.environment, capture_output=True)
        for folder in [*sorted(top.rglob("*"), reverse=True), top] if top.is_dir() else []:
            if folder.is_dir():
                with suppress(OSError):  # it is empty, and no harm to the next one
                    folder.rmdir()
    subprocess.run(["ip", "link", "del", BRIDGE], env=made.environment, capture_output=True)
