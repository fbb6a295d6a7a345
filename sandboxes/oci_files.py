"""Files of a container, moved by a process inside it as the user it is for.

Invariants: a link or path of the agent's reaches only what that user reaches inside; nothing is opened by the host;
only regular files are read and written; FIFOs and devices are refused, what becomes one in the last moment ends with
the timeout. The image needs `cat`, `head` and `mkdir` for it.
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
exec head -c "$2" < "$path"
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
children() {
  local stat pid rest
  for stat in /proc/[0-9]*/stat; do
    { read -r pid rest < "$stat"; } 2>/dev/null || continue
    rest=${rest##*) }
    set -- "$1" $rest
    [[ $3 == "$1" ]] && { kill -STOP "$pid" 2>/dev/null; children "$pid"; kill -KILL "$pid" 2>/dev/null; }
  done
}
kill -STOP "$1" 2>/dev/null
children "$1"
kill -KILL "$1" 2>/dev/null
"""
"""Argument: pid. For gVisor, whose processes no host tool sees."""

ACCOUNTS: Final = r"""
for file in /etc/passwd /etc/group; do
  [[ -f $file ]] && printf '%s\n' "$(head -c 1048576 < "$file")"
  printf '\0'
done
"""
"""Prints both account files, each followed by a zero byte."""
