"""Two machines on one: a rank in each of two network namespaces, joined by a cable (veth)."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import conftest
import pytest
from conftest import ACCELERATE, ROOT, SMALL, arguments, jsonl, same_metrics, wait_until

PID = os.getpid()
# (namespace, end of the cable, address)
HOSTS = [(f"nanoorz{PID}m{k}", f"cable{PID % 9999}{k}", f"192.168.77.{k + 1}") for k in (0, 1)]


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def machines():
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and iproute2")
    try:
        for host, _, _ in HOSTS:
            ip("netns", "add", host)
    except subprocess.CalledProcessError:
        pytest.skip("no permission for network namespaces")
    ip("link", "add", HOSTS[0][1], "type", "veth", "peer", "name", HOSTS[1][1])
    for host, cable, address in HOSTS:
        ip("link", "set", cable, "netns", host)
        ip("-n", host, "addr", "add", f"{address}/24", "dev", cable)
        ip("-n", host, "link", "set", "lo", "up")
        ip("-n", host, "link", "set", cable, "up")
        # The way out, but not to servers of names.
        ip("-n", host, "route", "add", "192.0.2.0/24", "dev", cable)
        # In that namespace the file lies over /etc/hosts. A name of the first machine means
        # 127.0.1.1 to itself, as on Debian.
        names = Path("/etc/netns") / host / "hosts"
        names.parent.mkdir(parents=True)
        first = "127.0.1.1" if host == HOSTS[0][0] else HOSTS[0][2]
        names.write_text(f"127.0.0.1 localhost\n{first} first\n")
    yield
    for machine, (host, _, _) in enumerate(HOSTS):
        power_off(machine)
        ip("netns", "del", host)
        shutil.rmtree(Path("/etc/netns") / host)


def start(run: Path, **flags) -> list[subprocess.Popen]:
    """The command that the docs tell to run on each machine."""
    multinode = "--use_deepspeed --deepspeed_multinode_launcher standard --num_machines 2"
    multinode += " --num_processes 2 --main_process_ip first --main_process_port 29577"
    processes = []
    for rank, (host, _, _) in enumerate(HOSTS):
        command = ["ip", "netns", "exec", host, sys.executable, *ACCELERATE, *multinode.split()]
        command += ["--machine_rank", str(rank), str(ROOT / "train.py")]
        command += arguments(SMALL | flags | {"run_dir": run})
        with open(f"{run}.{rank}.txt", "w") as log:
            options = {"stdout": log, "stderr": log, "start_new_session": True}
            processes.append(subprocess.Popen(command, env=conftest.clean_environment(), **options))
    return processes


def power_off(machine: int) -> None:
    """kill -9 for every process of a machine."""
    for pid in ip("netns", "pids", HOSTS[machine][0]).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


@pytest.mark.slow
def test_a_machine_that_dies_is_named_and_the_run_goes_on(machines, tiny, tmp_path):
    """One machine is killed in the middle of a step. The other soon ends and names its address. The
    steps behind the checkpoint are made again, and are the same."""
    run = tmp_path / "run"
    flags = tiny | {"zero_stage": 3, "save_interval": 2, "keep_last": 0}
    processes = start(run, **flags | {"max_steps": 500})
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2, processes[0])
    power_off(1)
    assert processes[0].wait(60) != 0
    address = re.escape(HOSTS[1][2])
    power_off(0)
    screen = Path(f"{run}.0.txt").read_text()
    assert re.search(rf"RuntimeError: [^\n]*{address}", screen), screen[-3000:]
    for path in run.glob("step_*"):
        if path.name > "step_000002":
            shutil.rmtree(path)
    before = jsonl(metrics)
    again = start(run, **flags | {"max_steps": len(before) + 1})
    codes = [process.wait(200) for process in again]
    screen = Path(f"{run}.0.txt").read_text()
    assert codes == [0, 0] and "from step 2," in screen, screen[-3000:]
    after = jsonl(metrics)
    assert [line["step"] for line in after] == list(range(1, len(before) + 2))
    assert list(map(same_metrics, before)) == list(map(same_metrics, after[:-1]))
