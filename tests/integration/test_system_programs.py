"""Programs of Debian that need much of the kernel, in a sandbox with its default limits.

Tried with
chromium 150.0.7871.100, nginx 1.22.1-9+deb12u9, mariadb-server 10.11.18 and openssh-server 9.2p1. Before each
process had 4,096 descriptors, Chromium ended with "Too many open files".
"""

from __future__ import annotations

import shutil
from typing import Final, NamedTuple

import pytest

from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig

pytestmark = pytest.mark.namespaces


class Program(NamedTuple):
    path: str
    package: str
    script: str
    says: str
    user: str = "agent"


PROGRAMS: Final = (
    Program(
        "/usr/lib/chromium/chromium",
        "chromium",
        """
        cd /tmp; mkdir home; echo '<p>hello</p>' > page.html; export HOME=/tmp/home
        /usr/lib/chromium/chromium --headless=new --disable-gpu --no-sandbox --dump-dom file:///tmp/page.html
        """,
        "<p>hello</p>",
    ),
    Program(
        "/usr/sbin/nginx",
        "nginx-light",
        """
        mkdir -p /var/lib/nginx /tmp/www; cd /tmp/www; echo served > page
        echo 'pid /tmp/pid; error_log /tmp/log; events {} http { access_log off;
          server { listen 127.0.0.1:8099; root /tmp/www; } }' > /tmp/nginx.conf
        nginx -c /tmp/nginx.conf && python3 -c '
        import urllib.request as r; print(r.urlopen("http://127.0.0.1:8099/page").read().decode())'
        """,
        "served",
        "root",
    ),
    Program(
        "/usr/sbin/mariadbd",
        "mariadb-server",
        """
        mkdir /tmp/data; server="--no-defaults --datadir=/tmp/data --user=root"
        mariadb-install-db $server --auth-root-authentication-method=normal > /dev/null 2>&1
        mariadbd $server --socket=/tmp/socket --skip-networking --innodb-use-native-aio=1 > /tmp/log 2>&1 &
        until mariadb --no-defaults --socket=/tmp/socket -Ne 'select 6 * 7' 2> /dev/null; do kill -0 $! || exit; done
        grep -o 'native AIO failed' /tmp/log
        """,
        "42\nnative AIO failed",
        "root",
    ),
    Program(
        "/usr/sbin/sshd",
        "openssh-server",
        """
        cd /tmp; ssh-keygen -q -t ed25519 -N '' -f key
        /usr/sbin/sshd -f /dev/null -D -p 2222 -h /tmp/key -o UsePAM=no -o AuthorizedKeysFile=/tmp/key.pub \\
          -o StrictModes=no -E /tmp/log &
        options="-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=QUIET"
        until ssh -i key -p 2222 $options agent@127.0.0.1 'echo inside'; do kill -0 $! || exit; done
        """,
        "inside",
    ),
)


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.package for program in PROGRAMS])
async def test_a_program_runs_in_a_sandbox(program: Program) -> None:
    if shutil.which(program.path) is None:
        pytest.skip(f"needs the package {program.package} of Debian")
    async with LocalProvider(LocalSandboxConfig(layer_bytes=1 << 30)) as provider:
        sandbox = await provider.attach(await provider.create(SandboxSpec(memory_bytes=4 << 30)))
        script = "\n".join(line.removeprefix("        ") for line in program.script.splitlines())
        result = await sandbox.exec(script, user=program.user, timeout_s=100)
        assert program.says in result.stdout.decode(), result
