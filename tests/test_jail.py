"""tasks/jail.py: what it contains, and what it needs. test_code.py has the grader of programs."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
from conftest import ROOT, wait_until
from jail_worker import ALLOWED, ATTACKS, OF_ROOT, processes

from nanoorz.ranks import UserError
from tasks.jail import Jail


def as_user(user, room):
    """The start of that user's command. Mounts lead another user to Python, also below /root."""
    if user == "mine":
        return [sys.executable]
    mount = 'mount --bind "$0" "$2/python" && mount --bind "$1" "$2/house" && cd "$2/house"'
    change = "exec setpriv --reuid=65534 --regid=65534 --clear-groups"
    script = f'mkdir "$2/python" "$2/house" && {mount} && {change} "$2/python/$3" "${{@:4}}"'
    program = os.path.relpath(os.path.realpath(sys.executable), sys.base_prefix)
    return ["unshare", "-m", "bash", "-c", script, sys.base_prefix, ROOT, room, program]


@pytest.mark.parametrize("user", ["mine", pytest.param("another", marks=pytest.mark.slow)])
@pytest.mark.engine
def test_each_attack_succeeds_without_the_jail_and_fails_behind_it(user, jail):
    """When the trainer is killed, its program ends too."""
    if user == "another" and os.getuid():
        pytest.skip("only root can be another user")
    is_root = user == "mine" and os.getuid() == 0
    with tempfile.TemporaryDirectory(dir="/tmp") as room:
        Path(room).chmod(0o777)
        command = [*as_user(user, room), "tests/jail_worker.py", room]
        with Popen(command, cwd=ROOT, text=True, stdout=PIPE, stderr=PIPE) as trainer:
            report = trainer.stdout.readline()
            if report:
                assert trainer.stdout.readline() == "runs\n"
                assert processes(f"killed_{room}")
            trainer.kill()
            errors = trainer.stderr.read()
        if "unshare failed" in errors:
            pytest.skip("this machine lets no other user reach Python")
        assert not errors
        outcomes = json.loads(report)
        for name in ATTACKS:
            assert outcomes[name] == ["done", "refused"], name
        for name in OF_ROOT:
            assert outcomes[name][1] == "refused", name
            # Linux may allow some of them to other users, too.
            assert outcomes[name][0] == "done" or not is_root, name
        for name in ALLOWED:
            assert outcomes[name][1] == "done", name
        wait_until(lambda: processes(f"killed_{room}") == [], seconds=60)


def test_a_program_ends_with_its_block_or_its_limits(jail):
    mark = f"endless_{os.getpid()}"
    with jail.start(["-", mark], b"while True: print('3' * 10000)") as process:
        assert process.stdout.read(1 << 20).startswith(b"333")
        assert processes(mark)
    wait_until(lambda: processes(mark) == [], seconds=60)
    # Process 1 of a container may not wait for the processes that bwrap leaves.
    with jail.start(["-"], b"import os\nwhile True: os.fork()") as process:
        pass
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    with jail.start(["-"], b"while True: pass") as process:
        assert (process.stdout.read(), process.wait()) == (b"", 128 + 24), "SIGXCPU"
    hasty = Jail(cpu_seconds=1, wall_seconds=60)
    hasty.wall_seconds = 0.5
    with hasty.start(["-"], b"import time\ntime.sleep(600)") as process:
        assert process.wait() == -9
    hasty.close()
    # A program on its way when the jail closes is ended.
    with hasty.start(["-"], b"import time\ntime.sleep(600)") as process:
        assert process.wait() == -9


def test_a_program_is_sent_when_bwrap_has_started(jail, tmp_path, monkeypatch):
    """bwrap ends with its parent, but not in its first milliseconds. A trainer that is killed then
    has sent nothing that would go on without it."""
    bwrap = tmp_path / "bwrap"
    bwrap.write_text(f"""#!{sys.executable}
import os, select, sys
if select.select([0], [], [], 1)[0]:
    open({str(tmp_path / "early")!r}, "w")
os.execv({shutil.which("bwrap")!r}, ["bwrap", *sys.argv[1:]])""")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with Jail(1, 60).start(["-"], b"print(3)") as process:
        assert process.stdout.read() == b"3\n"
    assert not (tmp_path / "early").exists()


def test_a_program_may_import_the_packages_of_this_python_if_it_is_allowed(jail):
    program = b"import numpy\nprint(numpy.arange(3).sum())"
    with jail.start(["-"], program, subprocess.STDOUT) as process:
        assert b"No module named 'numpy'" in process.stdout.read()
    with_packages = Jail(9, 60, packages=True)
    with with_packages.start(["-"], program) as process:
        assert process.stdout.read() == b"3\n"


def test_a_machine_that_cannot_contain_a_program_is_told_what_to_do(jail, monkeypatch, tmp_path):
    """Nothing runs unprotected: without bwrap, and where namespaces cannot be made."""
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(UserError, match="^no bwrap: install bubblewrap .*apt install"):
            Jail(1, 1)
    # A user namespace in which no further one can be made.
    inside = ["--unshare-user", "--disable-userns", "--uid", "65534", "--dev-bind", "/", "/"]
    script = (
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom tasks import jail\njail.Jail(1, 1)"
    )
    done = subprocess.run(
        ["bwrap", *inside, "--proc", "/proc", sys.executable, "-c", script],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert re.search("no program can be started: bwrap: .*; the jail needs .*sysctl", done.stderr)
