"""The process around a hostile program: gives up what the program must not have, then runs it on each input.

tools/sandbox.py starts it and sends a job on stdin (by marshal: json's import takes longer than all the rest); for each
input it answers a line (exit status, was it too late, output). Three modes, of which the first that works is used:
- namespaces landlock: processes, network, mounts, IPC and host name of its own; /proc hidden; its folder is a tmpfs
- landlock: of the machine it opens only Python and /usr, to read, and its folder; no second process
- plain: the same, but what its user may read or write, it may; seccomp only where the machine has it
In all: rlimits; its own user if we are root; no capabilities; seccomp (no sockets, signals, tracing, ...); no packages.
Not protected: holes in the kernel. Memory is limited per process, not in sum; disk space only by the tmpfs, else per
file. Names and sizes of files can be asked for. A program sees its input: it can tell tests that it learnt by heart.
Without namespaces and root: no threads. In plain mode without root the trainer itself, through /proc."""

import ctypes
import marshal
import os
import resource
import select
import struct
import sys

# Linux's numbers: machine, clone, prlimit, fork and vfork, then all that is refused: prctl; sockets, io_uring; signals;
# sessions, groups, priorities, CPUs; modes, owners, times, attributes of files (Landlock lets them pass); tracing;
# memory that outlives or escapes the limits (SysV, memfd); namespaces, keys, perf, bpf, userfaultfd
SYSCALLS = {
    "x86_64": (0xC000003E, 56, 302, "57 58 ", "157 41 425 62 129 200 234 297 424 434 112 109 141 142 144 203 251 314 "
               "90 91 268 452 92 93 94 260 132 235 280 261 188 189 190 197 198 199 463 466 469 76 101 310 311 29 64 68 "
               "240 319 272 308 248 249 250 298 321 323"),
    "aarch64": (0xC00000B7, 220, 261, "", "167 198 425 129 138 130 131 240 424 434 157 154 140 118 119 122 30 274 52 "
                "53 452 54 55 88 5 6 7 14 15 16 463 466 469 45 117 270 271 194 190 186 180 279 97 268 217 218 219 "
                "241 280 282")}


def call(name, *args):
    """A function of the C library; raises OSError where it fails."""
    if (result := getattr(ctypes.CDLL(None, use_errno=True), name)(*args)) < 0:
        raise OSError(ctypes.get_errno(), f"{name}{args}")
    return result


def contain(job):
    """In the new process, while only our code is in it. The order matters: each step takes away means."""
    call("prctl", 1, 9)  # PR_SET_PDEATHSIG: killed with the thread that started it
    call("alarm", job["wall_seconds"] * min(10, 1 + len(job["inputs"])))  # ends this process, and so all others
    prefix, uid = job["prefix"], 32768 + os.getpid() % 32766
    assert os.getppid() == job["parent"], "it died before it could be watched"
    if "namespaces" in job["mode"]:
        prefix = isolate(prefix)
    elif os.getuid() == 0:  # no other user passes a folder like /root, but the link of an open folder leads beyond
        prefix = f"/proc/self/fd/{os.open(prefix, os.O_PATH)}"
    sys.path[:] = [path.replace(job["prefix"], prefix, 1) for path in sys.path]
    if os.getuid() == 0:  # root is exempt from the limit of processes: a user of its own is not
        os.chown(".", uid, uid)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    for option in ((1, 9), (4, 0), (38, 1, 0, 0, 0)):  # again, as the user changed; not to be traced; NO_NEW_PRIVS
        call("prctl", *option)
    call("capset", struct.pack("=II", 0x20080522, 0), bytes(24))
    if "landlock" in job["mode"]:
        restrict(prefix)


def isolate(prefix):
    """Namespaces; returns where Python lies in them. The caller goes on as process 1: all others end with it."""
    user, group, folder = os.getuid(), os.getgid(), os.getcwd()
    call("unshare", 0x6C020000 | (0x10000000 if user else 0))  # mounts, IPC, host name, processes, network; users
    maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    for name, text in maps.items() if user else ():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    if os.fork():
        os.close(1)
        os._exit(os.wait()[1] and 1)
    call("prctl", 1, 9)
    call("mount", None, b"/", None, 0x44000, None)  # private: nothing below is seen outside
    call("mount", b"tmp", folder.encode(), b"tmpfs", 6, b"size=64m,nr_inodes=4k")
    os.chdir(folder)
    call("mount", os.fsencode(prefix), b"/proc", None, 0x5000, None)  # hides it; and /root lets no other user pass
    return "/proc"


def restrict(prefix):
    """Landlock: all rights in the folder; of Python and the system's libraries to read and to execute."""
    version = call("syscall", 444, None, 0, 1)
    rights = (1 << min(12 + version, 15)) - 1  # then no TCP, and no abstract sockets and signals of others
    ruleset = call("syscall", 444, struct.pack("=QQQ", rights, (version > 3) * 3, (version > 5) * 3), 24, 0)
    for path in (".", prefix, "/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache"):
        if os.access(path, os.R_OK):
            allowed = rights if path == "." else 13 if os.path.isdir(path) else 5  # 13: also to list folders
            call("syscall", 445, ruleset, 1, struct.pack("=Qi", allowed, os.open(path, os.O_PATH)), 0)
    call("syscall", 446, ruleset, 0)


def refuse(alone):
    """seccomp: EPERM for SYSCALLS; another architecture's numbers kill. Classic BPF: (code, jump if, if not, value)."""
    machine, clone, prlimit, forks, numbers = SYSCALLS[os.uname().machine]
    refused, killed, load = (6, 0, 0, 0x50001), (6, 0, 0, 1 << 31), (32, 0, 0, 16)  # load: the first argument
    threads = [(69, 1, 0, 0x10000), refused] if alone else []
    rules = [(32, 0, 0, 4), (21, 1, 0, machine), killed, (32, 0, 0, 0), (53, 0, 1, 1 << 30), killed]
    rules += [rule for number in (forks * alone + numbers).split() for rule in ((21, 0, 1, int(number)), refused)]
    rules += [(21, 0, 1, 435), (6, 0, 0, 0x50026)]  # clone3 hides its flags in memory: ENOSYS, libc then uses clone
    rules += [(21, 0, 3 + len(threads), clone), load, (69, 0, 1, 0x7E020000), refused, *threads]  # no new namespaces
    rules += [(21, 0, 3, prlimit), load, (21, 1, 0, 0), refused, (6, 0, 0, 0x7FFF0000)]  # not of other processes
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *rule) for rule in rules))
    call("prctl", 22, 2, struct.pack("@HP", len(rules), ctypes.addressof(code)))


def supervise(job):
    """Runs the program on each input, in a process of its own each, whose only ways out are two files in memory."""
    null = os.open("/dev/null", os.O_RDWR)
    contain(job)
    for text in job["inputs"]:
        files = [os.memfd_create(name) for name in ("in", "out")]
        os.write(files[0], b"" if job["calls"] else text.encode())
        os.lseek(files[0], 0, 0)
        if not (pid := os.fork()):
            for number, fd in enumerate((*files, null)):
                os.dup2(fd, number)
            sys.stdin = os.fdopen(0)
            return perform(job, text)  # and ends as programs do: threads joined, streams flushed
        files.append(os.pidfd_open(pid))
        if late := not select.select(files[2:], [], [], job["wall_seconds"])[0]:
            os.kill(pid, 9)
        status = os.waitpid(pid, 0)[1]
        while os.getpid() == 1 and not ctypes.CDLL(None).kill(-1, 9):  # only in our namespace: what it left behind
            os.wait()
        size = os.fstat(files[1]).st_size  # programs must not print far more than is expected; of calls only the end
        status = status or 256 * (size > job["most"] and not job["calls"])
        output = b"" if status else os.pread(files[1], job["most"], max(0, size - job["most"]))
        reply = status, late, output.decode(errors="replace")
        os.write(1, f"{reply!a}\n".encode())
        list(map(os.close, files))
        if status == 9 or status and not job["partial"]:  # out of time: the tests that are left would be as well
            return None


def perform(job, text):
    """The process that may be hostile from here on. The value of an expression is its last line of output."""
    call("prctl", 1, 9)  # killed with supervise, which is killed with the trainer
    try:
        refuse("namespaces" not in job["mode"])
    except (KeyError, OSError):
        if job["mode"] != "plain":
            raise
    for name, limit in job["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    sys.modules["__main__"] = main = type(sys)("__main__")
    exec(compile(job["code"], "program.py", "exec"), main.__dict__)
    if job["calls"]:
        value = eval(text, main.__dict__)
        kind = next((t for t in (dict, list, tuple, set) if isinstance(value, t)), None)  # a Counter is a dict
        print("\n" + repr(kind(value) if kind else value))


if __name__ == "__main__":
    supervise(marshal.loads(sys.stdin.buffer.read()))
