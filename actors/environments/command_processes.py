"""The end of the processes that one command of a terminal's shell has started.

Invariants:
- Children of the shell that are older than the command, and their descendants, are background jobs and stay. A process
  that left its session is found all the same: orphans become children of the shell or of the first process.
- The script runs as root with builtins only: nothing is looked up on a PATH, and it works when no more processes can be
  started (then without pauses).
- A process's name is never interpreted.
"""

from __future__ import annotations

from typing import Final

from headrace.sandboxes.base import Sandbox

_TIMEOUT_S: Final = 10.0
_SCRIPT: Final = r"""
shell=$1 ticks=$2 last=$3
{ exec {never}<> <(:); } 2> /dev/null || never=

pause() {
  [[ $never ]] && read -r -t 0.02 -u "$never"
}

# Sets `new` to the command's processes, and `alive` to those that are not zombies.
scan() {
  local path process line fields parent changed=1
  local -A parents=() states=() candidates=() found=()
  for path in /proc/[0-9]*/stat; do
    process=${path//[!0-9]/} line=
    { IFS= read -r -d '' line < "$path"; } 2> /dev/null
    [[ $line && $process != "$$" ]] || continue
    fields=(${line##*) })
    parents[$process]=${fields[1]} states[$process]=${fields[0]}
    if ((fields[19] > ticks || (fields[19] == ticks && process > last))); then
      candidates[$process]=1
    fi
  done
  while ((changed)); do
    changed=0
    for process in "${!parents[@]}"; do
      parent=${parents[$process]}
      if [[ ${found[$process]-} || $process == "$shell" || $process == 1 ]]; then
        continue
      fi
      if [[ ${found[$parent]-} || (${candidates[$process]-} && ($parent == "$shell" || $parent == 1)) ]]; then
        found[$process]=1 changed=1
      fi
    done
  done
  new=("${!found[@]}") alive=()
  for process in "${new[@]}"; do
    [[ ${states[$process]} == [ZX] ]] || alive+=("$process")
  done
}

for ((round = 0; round < 25; round++)); do
  scan
  ((${#alive[@]})) || break
  pause
done
for ((round = 0; round < 100; round++)); do
  scan
  ((${#new[@]})) || exit 0
  ((${#alive[@]} == 0)) || kill -KILL "${alive[@]}" 2> /dev/null
  pause
done
((${#alive[@]})) || exit 0
echo "${alive[@]}"
exit 1
"""
"""Waits half a second for processes that end by themselves, since Ctrl-C was pressed and they may clean up, and kills
the others. Prints the processes that are left and exits with 1 if there are any."""


async def end_command(sandbox: Sandbox, shell: int, *, ticks: int, last_process: int) -> bool:
    """End all processes that a command of the shell with this process id has started since `ticks` (10 ms each, since
    boot) and process id `last_process`, and wait until they are gone. Returns False if some are left. Raises
    SandboxError."""
    arguments = f"set -- {shell} {ticks} {last_process}"
    return (await sandbox.exec(f"{arguments}\n{_SCRIPT}", cwd="/", timeout_s=_TIMEOUT_S)).exit_code == 0
