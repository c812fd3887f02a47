"""Two machines on one: network namespaces with their own addresses, joined by a cable (veth), a rank on each."""
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
from conftest import ACCELERATE, ROOT, SMALL, clean_environment, jsonl, same_metrics

import ckpt

pytestmark = pytest.mark.slow
HOSTS = [(f"nanoorz{os.getpid()}m{i}", f"cable{os.getpid() % 9999}{i}", f"192.168.77.{i + 1}") for i in (0, 1)]


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
        ip("-n", host, "route", "add", "192.0.2.0/24", "dev", cable)  # the way out, but not to servers of names
        names = Path("/etc/netns") / host / "hosts"  # in that namespace it lies over /etc/hosts
        names.parent.mkdir(parents=True)
        names.write_text(f"127.0.0.1 localhost\n{HOSTS[0][2] if host != HOSTS[0][0] else '127.0.1.1'} first\n")
    yield
    for host, _, _ in HOSTS:
        ip("netns", "del", host)
        shutil.rmtree(Path("/etc/netns") / host)


def start(run: Path, *within: str, **flags) -> list[subprocess.Popen]:
    """The command that the docs tell to run on each machine; `within` wraps the second machine's."""
    argv = [str(x) for name, value in (SMALL | flags | {"run_dir": run}).items() for x in (f"--{name}", value)]
    processes = []
    for rank, (host, _, _) in enumerate(HOSTS):
        launcher = [*ACCELERATE, "--use_deepspeed", "--deepspeed_multinode_launcher", "standard", "--num_machines", "2",
                    "--num_processes", "2", "--machine_rank", str(rank), "--main_process_ip", "first",
                    "--main_process_port", "29577"]  # a name, which on Debian means 127.0.1.1 to the first one itself
        command = [sys.executable, *launcher, str(ROOT / "train.py"), *argv]
        command = [*within, *command] if rank else command
        log = open(f"{run}.{rank}.txt", "w")  # noqa: SIM115
        processes.append(subprocess.Popen(["ip", "netns", "exec", host, *command], stdout=log, stderr=log,
                                          env=clean_environment(), start_new_session=True))
    return processes


def said(run: Path) -> str:
    return "".join(Path(f"{run}.{rank}.txt").read_text() for rank in (0, 1))


def power_off(machine: int) -> None:
    """kill -9 for every process of a machine."""
    pids = subprocess.run(["ip", "netns", "pids", HOSTS[machine][0]], capture_output=True, text=True).stdout.split()
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
    """Step by step the same metrics, a complete checkpoint, and a resumed run that goes on to the same end."""
    run, same = tmp_path / "run", tiny | {"zero_stage": 3, "save_interval": 1, "max_steps": 3}
    processes = start(run, **same | {"max_steps": 1})
    assert wait(processes, run) == [0, 0], said(run)[-3000:]
    assert ckpt.manifest(run / "step_000001")
    assert wait(start(run, **same), run) == [0, 0], said(run)[-3000:]
    single = whole(ranks=2, zero_stage=3, save_interval=1, max_steps=3)
    assert list(map(same_metrics, jsonl(run / "metrics.jsonl"))) == list(
        map(same_metrics, jsonl(single / "metrics.jsonl")))


def test_a_machine_that_dies_is_named(machines, tiny, tmp_path):
    """Machine 1 is killed mid-step: machine 0 soon ends with an error that names its address; both can go on."""
    run, same = tmp_path / "run", tiny | {"zero_stage": 3, "save_interval": 1, "dist_timeout": 30}
    processes = start(run, **same | {"max_steps": 500})
    end = time.time() + 600
    while time.time() < end and not (run / "step_000002").exists():
        assert processes[0].poll() is None, said(run)[-3000:]
        time.sleep(0.1)
    assert (run / "step_000002").exists(), said(run)[-3000:]
    power_off(1)
    assert processes[0].wait(200) != 0, "--dist_timeout and the launcher's 30 s are a minute"
    assert re.search(rf"error: .*{re.escape(HOSTS[1][2])}", Path(f"{run}.0.txt").read_text()), said(run)[-3000:]
    done = len(jsonl(run / "metrics.jsonl"))
    wait(processes, run)
    assert wait(start(run, **same | {"max_steps": done + 2}), run) == [0, 0], said(run)[-3000:]
    assert [m["step"] for m in jsonl(run / "metrics.jsonl")] == list(range(1, done + 3))


def test_folder_that_is_not_shared(machines, tiny, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    elsewhere = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs {run} && exec "$@"', "sh"]
    assert all(wait(start(run, *elsewhere, **tiny), run))
    assert f"{run}: not shared" in said(run)
