"""What all of a sandbox's processes hold together: the limits of single processes do not bound their sum."""

import os

EVERY = 0.05  # seconds between two looks
MOST_FILES = 20_000  # of a program in /tmp; each costs the kernel about a kilobyte
PAGE = os.sysconf("SC_PAGE_SIZE")


def excess(spared, most_bytes):
    """What the processes of this PID namespace, but for `spared`, have too much of; None when all is well."""
    pages = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in spared:
            try:
                with open(f"/proc/{name}/statm", "rb") as statm:
                    _, resident, shared = statm.read().split()[:3]
            except (OSError, ValueError):  # it has ended
                continue
            pages += int(resident) - int(shared)
    if pages * PAGE > most_bytes:
        return f"needed more than {most_bytes >> 20} MiB together"
    files = os.statvfs("/tmp")
    return "made too many files" if files.f_files - files.f_ffree > MOST_FILES else None
