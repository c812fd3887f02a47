"""`accelerate launch` with the exit code of the rank that failed first, and without its traceback.

runs/launch.sh calls it. `accelerate launch` itself ends with 1 after any failure of a rank.
"""

import sys

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

try:
    launch_command(launch_command_parser().parse_args())
except ChildFailedError as error:
    _, failure = error.get_first_failure()
    # Of a rank that a signal has ended, the number is negative. A shell adds 128 to it.
    sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
