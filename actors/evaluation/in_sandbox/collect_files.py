"""Prints the regular files below the data paths, by path: the text of each, and the size of those that are not UTF-8.

Runs in a clean sandbox over read-only data: `python -I -S -c PROGRAM ARGUMENTS`. It uses no recursion, and exits when
the kernel refuses a path as too long, since skipped files would count as deleted.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys

TOO_MUCH, TOO_LONG = 3, 5
given, max_files, max_folders, max_bytes = json.loads(sys.argv[1])
paths = [path for path in given if os.path.lexists(path)]
found: dict[str, str] = {}
binary: dict[str, int] = {}
folders = size = 0
try:
    while paths:
        if folders + len(binary) > max_folders:
            sys.exit(TOO_MUCH)
        path = paths.pop()
        status = os.lstat(path)
        if stat.S_ISDIR(status.st_mode):
            folders += 1
            paths += [os.path.join(path, name) for name in os.listdir(path)]
        elif stat.S_ISREG(status.st_mode):
            with open(path, "rb") as file:
                content = file.read(max_bytes + 1)
            try:
                text = content.decode()
            except UnicodeDecodeError as error:
                # A character that was cut off at the limit does not make a file binary.
                if len(content) <= max_bytes or error.end < len(content):
                    binary[path] = status.st_size
                    continue
                sys.exit(TOO_MUCH)
            size += len(content)
            if size > max_bytes or len(found) >= max_files:
                sys.exit(TOO_MUCH)
            found[path] = text
except OSError as error:
    sys.exit(TOO_LONG if error.errno == errno.ENAMETOOLONG else repr(error))
json.dump([found, binary], sys.stdout)
