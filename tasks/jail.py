"""The process around a hostile program: gives up what the program must not have, then runs it.

tasks/code.py starts this file by `python -P -s -S` and sends a job on stdin. The job is marshalled,
because importing json would take longer than all the rest. For each input of the job this process
answers one line: (exit status, was it too late, output). There are three modes, and tasks/code.py
uses the first that works on its machine:
- "namespaces landlock": the program has process numbers, network, mounts, IPC and host name of its
  own. It does not see /proc, its folder is a tmpfs, and Landlock holds as in the next mode.
- "landlock": the program may read Python and the system's libraries and may use its folder, but no
  other file of the machine.
- "plain": the same without Landlock, so the program may read and write what its user may. Only
  this mode goes on where the machine has no seccomp.
In all modes a program is one process with resource limits, no capabilities and no packages, and it
has a user of its own if we are root. seccomp refuses it other processes, sockets, signals, tracing
and all else in REFUSED.

This is not protected, or not possible:
- A hole in the kernel is a hole in the jail.
- Disk space is limited in sum only by the tmpfs, elsewhere for each file.
- The names and sizes of files can be asked for.
- A program sees its input, so it can recognize tests that it learnt by heart.
- Without namespaces and without root a program cannot use threads.
- In plain mode without root, the program reaches the trainer itself through /proc.
"""

import ctypes
import errno
import marshal
import os
import resource
import select
import struct
import sys
import types

SIGKILL = 9
SIGXCPU = 24

# Options of prctl, as <linux/prctl.h> names them.
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2

# Flags of clone and unshare, as <linux/sched.h> names them.
CLONE_THREAD = 0x00010000
CLONE_NEWNS = 0x00020000  # mounts
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000  # host name
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
OWN_NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
ALL_NAMESPACES = OWN_NAMESPACES | CLONE_NEWUSER | CLONE_NEWCGROUP

# Flags of mount, as <linux/mount.h> names them.
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000

# Landlock's calls have the same numbers on all architectures. Rights are from <linux/landlock.h>.
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
LANDLOCK_CREATE_RULESET_VERSION = 1
LANDLOCK_RULE_PATH_BENEATH = 1
EXECUTE = 0x1
READ_FILE = 0x4
READ_DIR = 0x8

# Operations of classic BPF from <linux/bpf_common.h>: load a word of the system call, compare it
# with a value, or return a verdict.
LOAD = 0x20
IF_EQUAL = 0x15
IF_AT_LEAST = 0x35
IF_ANY_BIT = 0x45
RETURN = 0x06

# Offsets of the words in <linux/seccomp.h>'s seccomp_data, then its verdicts.
CALL_NUMBER = 0
ARCHITECTURE = 4
FIRST_ARGUMENT = 16
SECOND_ARGUMENT = 24
KILL_PROCESS = 0x80000000
FAIL_WITH = 0x00050000  # plus an errno
ALLOW = 0x7FFF0000
X32_CALLS = 0x40000000  # x86_64's second set of calls

# These arguments let the kernel send a signal to another process when a file becomes ready.
F_SETOWN = 8
F_SETSIG = 10
F_SETOWN_EX = 15
FIOSETOWN = 0x8901
SIOCSPGRP = 0x8902

# Pairs of sockets of this kind stay connected to each other.
AF_UNIX = 1
SOCK_STREAM = 1
SOCK_CLOEXEC = 0x80000
SOCK_NONBLOCK = 0x800
OTHER_TYPES = 0xFFFFFFFF - SOCK_STREAM - SOCK_CLOEXEC - SOCK_NONBLOCK

# Numbers of the architectures. The tables of system calls below have a column for each.
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# These calls are refused only with some arguments.
PARTLY_REFUSED = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "prlimit64": (302, 261),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "socketpair": (53, 199),
}
# These calls are always refused.
REFUSED = {
    # A second process would have all limits for itself again.
    "fork": (57, None),
    "vfork": (58, None),
    # prctl could lift the signal at the parent's death.
    "prctl": (157, 167),
    # Sockets, and io_uring, which opens them too.
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    # Signals to other processes.
    "kill": (62, 129),
    "rt_sigqueueinfo": (129, 138),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    # Sessions and process groups.
    "setsid": (112, 157),
    "setpgid": (109, 154),
    # Priorities and CPUs.
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    "sched_setattr": (314, 274),
    # Modes, owners, times and attributes of files, and their length, which Landlock lets pass.
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "utimensat": (280, 88),
    "futimesat": (261, None),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "truncate": (76, 45),
    # Tracing, and the memory of other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    # Memory that outlives the process or escapes its limits.
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    # Namespaces.
    "unshare": (272, 97),
    "setns": (308, 268),
    # Keys, and parts of the kernel with a history of holes.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
}


def call(name, *args):
    """Calls a function of the C library and returns its result; raises OSError where it fails."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    result = function(*args)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}{args}")
    return result


def contain(job):
    """Gives up rights of this new process, in which only our own code has run so far.

    The order matters, because each step takes away the means for others.
    """
    die_with_parent()
    # The alarm ends this process, and with it all that it starts.
    call("alarm", job["wall_seconds"] * min(10, 1 + len(job["inputs"])))
    uid = 32768 + os.getpid() % 32766
    assert os.getppid() == job["parent"], "the trainer died before this process could watch it"
    prefix = job["prefix"]
    if "namespaces" in job["mode"]:
        prefix = isolate(prefix)
    elif os.getuid() == 0:
        # A user other than root cannot pass a folder like /root. An open folder leads beyond it.
        prefix = f"/proc/self/fd/{os.open(prefix, os.O_PATH)}"
    sys.path[:] = [path.replace(job["prefix"], prefix, 1) for path in sys.path]
    if os.getuid() == 0:
        # The limit of processes does not hold for root, so the program gets a user of its own.
        os.chown(".", uid, uid)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    # Linux forgets this request when the user changes.
    die_with_parent()
    # Other processes of the same user cannot trace a process that is not dumpable.
    call("prctl", PR_SET_DUMPABLE, 0)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    drop_capabilities()
    if "landlock" in job["mode"]:
        restrict(prefix)


def die_with_parent():
    """Lets the kernel kill this process when the thread that started it ends."""
    call("prctl", PR_SET_PDEATHSIG, SIGKILL)


def drop_capabilities():
    header = struct.pack("=II", 0x20080522, 0)  # version 3 of the call, this process
    call("capset", header, bytes(24))


def isolate(prefix):
    """Enters namespaces of its own and returns the path under which Python lies in them.

    The caller goes on as process 1 of the new namespace, so all others in it end with it.
    """
    user = os.getuid()
    group = os.getgid()
    folder = os.getcwd()
    if user == 0:
        call("unshare", OWN_NAMESPACES)
    else:
        call("unshare", OWN_NAMESPACES | CLONE_NEWUSER)
        write_text("/proc/self/setgroups", "deny")
        write_text("/proc/self/uid_map", f"{user} {user} 1")
        write_text("/proc/self/gid_map", f"{group} {group} 1")
    child = os.fork()
    if child:
        os.close(1)
        _, status = os.wait()
        os._exit(1 if status else 0)
    die_with_parent()
    # Nothing that is mounted from here on is seen outside.
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    size = b"size=64m,nr_inodes=4k"
    call("mount", b"tmp", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, size)
    os.chdir(folder)
    # Python is mounted over /proc: this hides /proc, and no folder like /root is in the way.
    call("mount", os.fsencode(prefix), b"/proc", None, MS_BIND | MS_REC, None)
    return "/proc"


def write_text(path, text):
    with open(path, "w") as file:
        file.write(text)


def restrict(prefix):
    """Landlock: all rights in the folder; Python and the system's libraries to read and execute."""
    version = call("syscall", LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_CREATE_RULESET_VERSION)
    # Version 1 has 13 rights on files, and versions 2 and 3 add one each. Later ones are not used.
    file_rights = (1 << min(12 + version, 15)) - 1
    tcp_rights = 3 if version >= 4 else 0  # bind, connect
    scopes = 3 if version >= 6 else 0  # others' abstract sockets, signals
    attributes = struct.pack("=QQQ", file_rights, tcp_rights, scopes)
    ruleset = call("syscall", LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    allow(ruleset, ".", file_rights)
    for path in (prefix, "/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache"):
        if os.path.isdir(path):
            allow(ruleset, path, EXECUTE | READ_FILE | READ_DIR)
        else:
            allow(ruleset, path, EXECUTE | READ_FILE)
    call("syscall", LANDLOCK_RESTRICT_SELF, ruleset, 0)


def allow(ruleset, path, rights):
    """Grants rights on a path and all below it, if the machine has the path."""
    if os.access(path, os.R_OK):
        rule = struct.pack("=Qi", rights, os.open(path, os.O_PATH))
        call("syscall", LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, rule, 0)


def refuse_calls():
    """Installs the seccomp filter. Raises KeyError on an unknown architecture."""
    instructions = call_filter(os.uname().machine)
    code = ctypes.create_string_buffer(b"".join(instructions))
    program = struct.pack("@HP", len(instructions), ctypes.addressof(code))
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program)


def call_filter(machine):
    """Returns the BPF program that the kernel runs at each system call, as a list of instructions.

    The program may start threads, but no second process.
    """
    allow_call = instruction(RETURN, ALLOW)
    kill = instruction(RETURN, KILL_PROCESS)
    forbid = instruction(RETURN, FAIL_WITH | errno.EPERM)
    no_such_call = instruction(RETURN, FAIL_WITH | errno.ENOSYS)

    # Calls of another architecture have other numbers, so the tables would not stop them.
    native = ARCHITECTURES[machine]
    filters = [instruction(LOAD, ARCHITECTURE), *unless(IF_EQUAL, native, kill)]
    filters += [instruction(LOAD, CALL_NUMBER), *when(IF_AT_LEAST, X32_CALLS, kill)]

    column = list(ARCHITECTURES).index(machine)
    for numbers in REFUSED.values():
        if numbers[column] is not None:
            filters += when(IF_EQUAL, numbers[column], forbid)

    # The filter cannot see the flags of clone3, which lie in memory. Without it libc uses clone.
    filters += when(IF_EQUAL, PARTLY_REFUSED["clone3"][column], no_such_call)
    for name, tests in argument_tests(forbid).items():
        filters += when(IF_EQUAL, PARTLY_REFUSED[name][column], *tests, allow_call)
    return [*filters, allow_call]


def argument_tests(forbid):
    """{name of a call: instructions that forbid it with some arguments}."""
    load_first = instruction(LOAD, FIRST_ARGUMENT)
    load_second = instruction(LOAD, SECOND_ARGUMENT)
    clone = [load_first, *unless(IF_ANY_BIT, CLONE_THREAD, forbid)]
    clone += when(IF_ANY_BIT, ALL_NAMESPACES, forbid)
    # Process 0 is the caller itself. The limits of other processes are none of its business.
    prlimit = [load_first, *unless(IF_EQUAL, 0, forbid)]
    fcntl = [load_second]
    for command in (F_SETOWN, F_SETSIG, F_SETOWN_EX):
        fcntl += when(IF_EQUAL, command, forbid)
    ioctl = [load_second]
    for command in (FIOSETOWN, SIOCSPGRP):
        ioctl += when(IF_EQUAL, command, forbid)
    # asyncio needs a pair of streams. A datagram socket could send to any other of the machine.
    pair = [load_first, *unless(IF_EQUAL, AF_UNIX, forbid)]
    pair += [load_second, *when(IF_ANY_BIT, OTHER_TYPES, forbid)]
    return {
        "clone": clone,
        "prlimit64": prlimit,
        "fcntl": fcntl,
        "ioctl": ioctl,
        "socketpair": pair,
    }


def when(test, value, *body):
    """The body runs only if the loaded word passes the test against the value."""
    return [instruction(test, value, skip_if_false=len(body)), *body]


def unless(test, value, *body):
    """The body runs only if the loaded word fails the test against the value."""
    return [instruction(test, value, skip_if_true=len(body)), *body]


def instruction(operation, value, skip_if_true=0, skip_if_false=0):
    """One instruction of classic BPF. A test skips so many of the instructions that follow."""
    return struct.pack("=HBBI", operation, skip_if_true, skip_if_false, value)


def supervise(job):
    """Runs the program on each input in a new process, and writes a line of reply for each.

    The only ways out of such a process are two files in memory.
    """
    null = os.open("/dev/null", os.O_RDWR)
    contain(job)
    for text in job["inputs"]:
        stdin = os.memfd_create("in")
        stdout = os.memfd_create("out")
        if not job["calls"]:
            os.write(stdin, text.encode())
            os.lseek(stdin, 0, os.SEEK_SET)
        pid = os.fork()
        if pid == 0:
            os.dup2(stdin, 0)
            os.dup2(stdout, 1)
            os.dup2(null, 2)
            sys.stdin = os.fdopen(0)
            perform(job, text)
            # It ends as programs do: Python joins threads and flushes streams.
            return
        status, is_late = await_end(pid, job["wall_seconds"])
        status, output = read_output(stdout, status, job)
        reply = ascii((status, is_late, output.decode(errors="replace")))
        os.write(1, f"{reply}\n".encode())
        os.close(stdin)
        os.close(stdout)
        # After one test that ran out of time, the others would as well.
        if status in (SIGKILL, SIGXCPU) or (status and not job["partial"]):
            return


def await_end(pid, seconds):
    """Returns (wait status, was it too late) of a child, which has ended by then."""
    process = os.pidfd_open(pid)
    ended, _, _ = select.select([process], [], [], seconds)
    if not ended:
        os.kill(pid, SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(process)
    return status, not ended


def read_output(stdout, status, job):
    """Returns (wait status, output in bytes). A failed program has no output.

    Of a call only the end is read; a program fails that prints far more than is expected.
    """
    size = os.fstat(stdout).st_size
    longest = job["longest_output"]
    if status == 0 and size > longest and not job["calls"]:
        status = 256  # exit code 1
    if status:
        return status, b""
    return status, os.pread(stdout, longest, max(0, size - longest))


def perform(job, text):
    """Runs the program, so that this process may be hostile from here on.

    The value of an expression becomes the last line of output.
    """
    die_with_parent()
    try:
        refuse_calls()
    except (KeyError, OSError):
        if job["mode"] != "plain":
            raise
    # At the lower limit of CPU time the kernel sends SIGXCPU, and SIGKILL at the upper one. So the
    # end by this limit differs from that by other kills, as where the machine has no memory left.
    for name, limit in job["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit + 1))
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(job["code"], "program.py", "exec"), main.__dict__)
    if job["calls"]:
        value = eval(text, main.__dict__)
        # A Counter counts as a dict: ast.literal_eval reads only the plain types.
        for kind in (dict, list, tuple, set):
            if isinstance(value, kind):
                value = kind(value)
        print("\n" + repr(value))


if __name__ == "__main__":
    supervise(marshal.loads(sys.stdin.buffer.read()))
