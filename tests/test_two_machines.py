"""Two machines on one: network namespaces with their own addresses, joined by a cable (veth).

A rank runs on each.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ACCELERATE, ROOT, SMALL, arguments, clean_environment, jsonl, same_metrics

import ckpt

pytestmark = pytest.mark.slow
HOSTS = []  # (namespace, end of the cable, address)
for number in (0, 1):
    namespace = f"nanoorz{os.getpid()}m{number}"
    HOSTS.append((namespace, f"cable{os.getpid() % 9999}{number}", f"192.168.77.{number + 1}"))


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


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
    for host, _, _ in HOSTS:
        ip("netns", "del", host)
        shutil.rmtree(Path("/etc/netns") / host)


def start(run: Path, *within: str, **flags) -> list[subprocess.Popen]:
    """The command that the docs tell to run on each machine; `within` wraps the second one's."""
    processes = []
    for rank, (host, _, _) in enumerate(HOSTS):
        command = [sys.executable, *ACCELERATE, "--use_deepspeed"]
        command += ["--deepspeed_multinode_launcher", "standard"]
        command += ["--num_machines", "2", "--num_processes", "2", "--machine_rank", str(rank)]
        command += ["--main_process_ip", "first", "--main_process_port", "29577"]
        command += [str(ROOT / "train.py"), *arguments(SMALL | flags | {"run_dir": run})]
        if rank == 1:
            command = [*within, *command]
        with open(f"{run}.{rank}.txt", "w") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", host, *command],
                stdout=log,
                stderr=log,
                env=clean_environment(),
                start_new_session=True,
            )
        processes.append(process)
    return processes


def said(run: Path) -> str:
    return "".join(Path(f"{run}.{rank}.txt").read_text() for rank in (0, 1))


def power_off(machine: int) -> None:
    """kill -9 for every process of a machine."""
    command = ["ip", "netns", "pids", HOSTS[machine][0]]
    pids = subprocess.run(command, capture_output=True, text=True).stdout.split()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def wait(processes, run: Path, seconds: float = 200) -> list[int]:
    try:
        return [process.wait(seconds) for process in processes]
    finally:
        for machine in (0, 1):
            power_off(machine)


def test_same_run_as_two_ranks_on_one_machine(machines, tiny, whole, tmp_path):
    """Step by step the same metrics, and a resumed run that goes on to the same end."""
    run = tmp_path / "run"
    flags = {"zero_stage": 3, "save_interval": 1, "max_steps": 3}
    processes = start(run, **tiny | flags | {"max_steps": 1})
    assert wait(processes, run) == [0, 0], said(run)[-3000:]
    assert ckpt.manifest(run / "step_000001")
    assert wait(start(run, **tiny | flags), run) == [0, 0], said(run)[-3000:]
    single = whole(ranks=2, **flags)
    ours, theirs = (jsonl(folder / "metrics.jsonl") for folder in (run, single))
    assert list(map(same_metrics, ours)) == list(map(same_metrics, theirs))


def test_a_machine_that_dies_is_named(machines, tiny, tmp_path):
    """One machine is killed in the middle of a step. The other soon ends and names its address."""
    run = tmp_path / "run"
    flags = tiny | {"zero_stage": 3, "save_interval": 1}
    processes = start(run, **flags | {"max_steps": 500})
    end = time.time() + 600
    while time.time() < end and not (run / "step_000002").exists():
        assert processes[0].poll() is None, said(run)[-3000:]
        time.sleep(0.1)
    assert (run / "step_000002").exists(), said(run)[-3000:]
    power_off(1)
    assert processes[0].wait(200) != 0, "the launcher gives its ranks 30 s"
    address = re.escape(HOSTS[1][2])
    screen = Path(f"{run}.0.txt").read_text()
    assert re.search(rf"(?s)Traceback.*Error: [^\n]*{address}", screen), screen[-3000:]
    done = len(jsonl(run / "metrics.jsonl"))
    wait(processes, run)
    again = start(run, **flags | {"max_steps": done + 2})
    assert wait(again, run) == [0, 0], said(run)[-3000:]
    steps = [line["step"] for line in jsonl(run / "metrics.jsonl")]
    assert steps == list(range(1, done + 3))


def test_a_folder_that_is_not_shared_is_refused(machines, tiny, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    mount = f'mount -t tmpfs tmpfs {run} && exec "$@"'
    processes = start(run, "unshare", "--mount", "sh", "-c", mount, "sh", **tiny)
    assert all(wait(processes, run))
    assert f"{run}: not shared" in said(run)
