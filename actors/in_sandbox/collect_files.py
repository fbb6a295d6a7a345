"""Prints the text of all regular files below the data paths, as a JSON object keyed by path.

Runs in a clean sandbox over read-only data: `python -I -S -c PROGRAM ARGUMENTS`. It uses no recursion, and exits when
the kernel refuses a path as too long, since skipped files would count as deleted.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys

TOO_MUCH, NO_TEXT, TOO_LONG = 3, 4, 5
paths, max_files, max_folders, max_bytes = json.loads(sys.argv[1])
found: dict[str, str] = {}
folders = size = 0
try:
    while paths:
        path = paths.pop()
        status = os.lstat(path)
        if stat.S_ISDIR(status.st_mode):
            folders += 1
            paths += [os.path.join(path, name) for name in os.listdir(path)]
        elif stat.S_ISREG(status.st_mode):
            size += status.st_size
            if size > max_bytes or len(found) >= max_files:
                sys.exit(TOO_MUCH)
            with open(path, encoding="utf-8", newline="") as file:
                found[path] = file.read()
        if folders > max_folders:
            sys.exit(TOO_MUCH)
except UnicodeDecodeError:
    sys.exit(NO_TEXT)
except OSError as error:
    sys.exit(TOO_LONG if error.errno == errno.ENAMETOOLONG else repr(error))
json.dump(found, sys.stdout)
