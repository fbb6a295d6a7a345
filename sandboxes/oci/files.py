"""Shell programs that read and write files inside a container, as the user for whom they run.

Invariants: an agent's link or path reaches only files that the user can reach inside; the host opens nothing; only
regular files are read and written; FIFOs and devices are refused, and if one appears after the check, the timeout ends
the operation. The image needs `cat`, `head` and `mkdir`.
"""

from __future__ import annotations

from typing import Final

EXIT_FILE_ERROR: Final = 3

READ: Final = r"""
fail() { printf '%s: %s\n' "$path" "$1" >&2; exit 3; }
path=$1
[[ $path == /* ]] || fail 'not an absolute path'
[[ -L $path ]] && fail 'not a regular file: a symbolic link'
[[ -e $path ]] || fail 'No such file or directory'
[[ -f $path ]] || fail 'not a regular file'
[[ -r $path ]] || fail 'Permission denied'
if command -v head > /dev/null; then exec head -c "$2" < "$path"; fi
exec cat < "$path"
"""
"""Arguments: path, number of bytes."""

WRITE: Final = r"""
fail() { printf '%s: %s\n' "$path" "$1" >&2; exit 3; }
umask 022
path=$1
[[ $path == /* && $path != */ ]] || fail 'not an absolute path of a file'
folder=${path%/*}
[[ -z $folder || -d $folder ]] || mkdir -p -- "$folder" || exit 3
[[ -L $path ]] && fail 'not a regular file: a symbolic link'
[[ ! -e $path || -f $path ]] || fail 'not a regular file'
{ : > "$path"; } 2>/dev/null || fail 'cannot be opened for writing: no permission, or no space'
cat > "$path" || exit 3
"""
"""Argument: path. Standard input: the content."""

KILL_TREE: Final = r"""
entry() { # pid: sets parent and start
  local stat fields
  { read -r stat < "/proc/$1/stat"; } 2>/dev/null || return 1
  fields=(${stat##*) })
  parent=${fields[1]} start=${fields[19]}
}
tree() {
  local path
  kill -STOP "$1" 2>/dev/null
  for path in /proc/[0-9]*; do
    entry "${path#/proc/}" && [[ $parent == "$1" ]] && tree "${path#/proc/}"
  done
  kill -KILL "$1" 2>/dev/null
}
entry "$1" && born=$start
tree "$1"
[[ $2 == strays && -n $born ]] || exit 0
for round in 1 2 3; do
  for path in /proc/[0-9]*; do
    pid=${path#/proc/}
    [[ $pid != 1 && $pid != $$ ]] && entry "$pid" && (( parent <= 1 && start >= born )) && tree "$pid"
  done
done
"""
"""Arguments: pid; `strays` to kill younger orphans too. For gVisor, whose processes the host cannot see."""

ACCOUNTS: Final = r"""
for file in /etc/passwd /etc/group; do
  [[ -f $file ]] && printf '%s\n' "$(head -c 1048576 < "$file")"
  printf '\0'
done
"""
"""Prints both account files, each followed by a zero byte."""
