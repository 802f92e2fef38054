"""Processor time of this process, by what its threads are for.

Python's threads have a clock each. What is left is of threads that C++ has started: for the most part gloo's loops.
"""

import resource
import threading
import time

ROLES = {
    "MainThread": "training",
    "ddp_crossover-post": "posting",
    "ddp_crossover-reduce": "reducing",
    "ddp_crossover-wait": "waiting",
}
OTHERS = "gloo and others"
COLUMNS = (*ROLES.values(), OTHERS)


def processor_s() -> dict[str, float]:
    """Seconds in user and in kernel mode up to now, for each of `COLUMNS`; their sum is that of the process.

    Time of a thread that has ended moves to `OTHERS`.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    sums_s = dict.fromkeys(COLUMNS, 0.0)
    for thread in threading.enumerate():
        if (role := ROLES.get(thread.name)) and thread.ident is not None:
            sums_s[role] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return sums_s | {OTHERS: usage.ru_utime + usage.ru_stime - sum(sums_s.values())}
