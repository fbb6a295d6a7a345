"""Hosts of namespaces: sandboxes inside them, and a Ray cluster over them that outlives its head."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from headrace.buffer.primitives.durable_files import write_private
from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.errors import ProviderUnreachable, SandboxError
from headrace.sandboxes.remote.provider import RemoteConfig, RemoteProvider
from support.hosts import Host, Network
from support.marks import NEEDS_HOSTS
from support.ray_hosts import RayHosts, redis_folder

pytestmark = [
    pytest.mark.timeout(600),
    *NEEDS_HOSTS,
]

PORT = 5000


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    # Hosts have a /tmp of their own, in which only this folder of the outer one appears.
    network = Network(tmp_path / "shared")
    yield network
    network.close()


@asynccontextmanager
async def serving(host: Host, folder: Path) -> AsyncIterator[RemoteProvider]:
    """Start a sandbox server in a host; yields its client."""
    write_private(folder / "keys", b"team:one-key\n")
    (folder / "key").write_text("one-key\n", encoding="utf-8")
    for name in ("keys", "key"):
        (folder / name).chmod(0o600)
    log = folder / f"{host.name}-server.log"
    log.write_bytes(b"")  # it may have that of this host before its boot
    headrace = Path(sys.executable).with_name("headrace")
    options = ("--host", host.address, "--port", str(PORT), "--keys", str(folder / "keys"), "--state", "/tmp/state")
    server = host.start(str(headrace), "serve", "sandbox", *options, log=log)
    url = f"http://{host.address}:{PORT}"
    while url not in log.read_text(encoding="utf-8"):
        assert server.poll() is None, log.read_text(encoding="utf-8")
        await asyncio.sleep(0.05)
    provider = RemoteProvider(RemoteConfig(url=url, key_file=folder / "key"))
    await provider.start()
    try:
        yield provider
    finally:
        await provider.detach()


async def test_sandboxes_of_two_hosts_are_apart_and_a_lost_host_leaves_nothing(network: Network) -> None:
    hosts_of = [network.boot(11), network.boot(12)]
    async with AsyncExitStack() as stack:
        providers = [await stack.enter_async_context(serving(host, network.shared)) for host in hosts_of]
        sandboxes = [await provider.attach(await provider.create(SandboxSpec())) for provider in providers]
        users = [
            (await sandbox.exec("cat /proc/self/uid_map", timeout_s=30)).stdout.split()[1] for sandbox in sandboxes
        ]
        # One kernel counts the processes of a user id, so two hosts must not give out the same one.
        assert users[0] != users[1]
        for sandbox in sandboxes:
            assert (await sandbox.exec("echo kept > file && cat file", timeout_s=30)).stdout == b"kept\n"
        lost = hosts_of[0]
        assert lost.control_groups()

        lost.kill()
        assert (lost.processes(), lost.control_groups()) == ([], [])
        with pytest.raises((SandboxError, TimeoutError)):
            async with asyncio.timeout(15):
                await sandboxes[0].exec("true", timeout_s=5)
        assert (await sandboxes[1].exec("cat file", timeout_s=30)).stdout == b"kept\n"

        # The same machine, booted again: its disk is empty, and its server knows no sandbox of before.
        again = await stack.enter_async_context(serving(network.boot(11), network.shared))
        assert not await again.list()


async def test_a_cut_host_answers_again_when_the_link_is_back(network: Network) -> None:
    host = network.boot(11)
    async with serving(host, network.shared) as provider:
        sandbox = await provider.attach(await provider.create(SandboxSpec()))
        host.cut()
        with pytest.raises((SandboxError, TimeoutError)):
            async with asyncio.timeout(3):
                await sandbox.exec("echo lost", timeout_s=5)
        host.join()
        # The kernel still remembers for a moment that nobody answered at this address.
        again = AsyncRetrying(
            retry=retry_if_exception_type(ProviderUnreachable), wait=wait_fixed(0.2), stop=stop_after_delay(60)
        )
        assert (await again(sandbox.exec, "echo back", timeout_s=30)).stdout == b"back\n"


COUNTER = """
import json, os, sys, ray

class Counter:
    def __init__(self):
        self.calls = 0

    def count(self):
        self.calls += 1
        return self.calls, os.getpid(), ray.util.get_node_ip_address()

ray.init(address=os.environ["RAY_ADDRESS"], namespace="test", log_to_driver=False)
if sys.argv[1:] == ["make"]:
    options = {"name": "counter", "lifetime": "detached", "num_cpus": 0.1}
    counter = ray.remote(Counter).options(label_selector={"headrace/role": "rollout"}, **options).remote()
else:
    counter = ray.get_actor("counter")
print(json.dumps(ray.get(counter.count.remote(), timeout=60)))
"""


@pytest.mark.slow
def test_an_actor_outlives_the_head_of_its_cluster(network: Network) -> None:
    if (redis := redis_folder()) is None:
        pytest.skip("scripts/install redis could not install Redis here")
    program = network.shared / "counter.py"
    program.write_text(COUNTER, encoding="utf-8")
    with RayHosts(network, redis) as cluster:
        head = cluster.head()
        node = cluster.node(11, role="rollout")
        calls, process, address = json.loads(cluster.run(node, str(program), "make").splitlines()[-1])
        assert (calls, address) == (1, node.address)
        head.kill()
        cluster.head()
        again = json.loads(cluster.run(node, str(program)).splitlines()[-1])
        assert again == [2, process, node.address]
        assert node.processes(), "the node was not restarted"
