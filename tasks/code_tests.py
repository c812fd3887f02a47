"""Runs the tests of one program. tasks/code.py sends this file into the jail of tasks/jail.py.

A job is a dict, packed by marshal, because an import of json would take longer than this file. For
each test there is a result: a line with the exit code and the length of the output in bytes, and
then the output. A program could change this process, which has the same rights. It would gain no
right answer, because the expected values are not in the jail.
"""

import marshal
import os
import select
import sys
import types

# An import of signal would take longer than all else in this file.
SIGKILL = 9


def run_tests(job):
    null = os.open("/dev/null", os.O_WRONLY)
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
            run_program(job, text)
            # The child returns, so that Python ends as usual: it joins threads and flushes streams.
            return
        code = await_end(pid, job["seconds"])
        code, output = read_output(stdout, code, job)
        os.write(1, b"%d %d\n" % (code, len(output)) + output)
        os.close(stdin)
        os.close(stdout)
        if code:  # One failure decides.
            return


def run_program(job, text):
    """Runs the program. If the test is an expression, its value becomes the last line of output."""
    main = types.ModuleType("__main__")
    # Python started without `site`, which makes these two.
    main.exit = main.quit = sys.exit
    sys.modules["__main__"] = main
    if not job["calls"]:
        exec(compile(job["program"], "program.py", "exec"), main.__dict__)
        return
    try:
        for part in ("before", "program", "after"):
            exec(compile(job[part], f"{part}.py", "exec"), main.__dict__)
        value = eval(text, main.__dict__)
    except SystemExit:
        # What the program has printed is not the value of the call.
        sys.exit(1)
    print("\n" + repr(to_plain(value)))


def to_plain(value):
    """The value in types that ast.literal_eval reads. A Counter, for example, becomes a dict."""
    if isinstance(value, dict):
        return {to_plain(key): to_plain(member) for key, member in value.items()}
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return kind(map(to_plain, value))
    return value


def await_end(pid, seconds):
    """The exit code, or minus the number of a signal. Kills what is left after so many seconds."""
    pidfd = os.pidfd_open(pid)
    select.select([pidfd], [], [], seconds)
    # In the jail these are its processes, except this one and process 1. Elsewhere: all of a user.
    os.kill(-1, SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(pidfd)
    return os.waitstatus_to_exitcode(status)


def read_output(stdout, code, job):
    """(exit code, output). Output far longer than the test expects is a failure, and a failure has
    no output. If the tests are calls, the end of the output is enough."""
    size = os.fstat(stdout).st_size
    longest = job["longest_output"]
    if size > longest and not job["calls"]:
        code = code or 1
    if code:
        return code, b""
    return 0, os.pread(stdout, longest, max(0, size - longest))


if __name__ == "__main__":
    run_tests(marshal.load(sys.stdin.buffer))
