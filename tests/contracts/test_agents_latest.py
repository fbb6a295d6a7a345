"""The newest version of each agent: whoever wants to raise a pin runs this by hand, with `-m agents_latest`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.actors.agents.programs.agent import StopReason
from headrace.actors.agents.programs.cli_agent import ProgramConfig
from headrace.actors.agents.programs.installation import PINNED, InstallFailed, install
from headrace.sandboxes import doctor
from headrace.sandboxes.errors import NamespacesUnavailable
from support import agent_rig as rigs

pytestmark = [pytest.mark.agents_latest, pytest.mark.namespaces, pytest.mark.timeout(900)]


@pytest.mark.parametrize("agent", PINNED)
async def test_the_newest_agent_version_loses_no_token(agent: str, tmp_path: Path) -> None:
    try:
        doctor.require_namespaces()
        folder = await asyncio.to_thread(install, agent, latest=True)
    except (NamespacesUnavailable, InstallFailed) as error:
        pytest.skip(str(error))
    print(folder.name)
    rigs.write_tokenizer(tmp_path)
    commands = [
        rigs.command_of(agent, command) for command in ("ls", "printf 'def add(a, b):\\n    return a + b\\n' > calc.py")
    ]
    script = rigs.scripted.Parts({"title generator": ["Mending add"], "": [*commands, rigs.ending_of(agent)]})
    async with rigs.open_rig(tmp_path, script) as rig:
        ran = await rig.run(rigs.AGENTS[agent](ProgramConfig(folder=folder)))
        await ran.check_fixed()
        assert ran.session.failures == ()
        rigs.scripted.check_exact(ran.session, [rig.engine])
        assert set(ran.session.masked) <= ({"side"} if agent == "opencode" else set())
        assert len(ran.session.trajectory.rows) == 1
        assert (ran.agent.stop, ran.agent.exit_code) == (StopReason.FINISHED, 0)
        await ran.check_quiet()
