"""Terminal tasks: solved by their scripts, failed by doing nothing; commands of any kind harm nothing."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from random import Random

import pytest
import pytest_asyncio

from roll.envs.worlds.terminal import SUBMIT, Terminal, extract_command
from roll.envs.worlds.terminal_tasks import FAMILIES
from roll.errors import UnsupportedError

pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keeper() -> AsyncIterator[Terminal]:
    """An environment that is open as long as the tests are, so that they share its sandboxes' manager."""
    env = Terminal()
    await env.reset(0)
    yield env
    await env.close()


async def outcome(family: str, seed: int, *, solve: bool) -> float:
    env = Terminal(families=[family])
    try:
        await env.reset(seed)
        reward = 0.0
        for action in env.solution() if solve else [SUBMIT]:
            _, reward, ended, cut_off, info = await env.step(action)
        assert ended
        assert not cut_off
        assert info["family"] == family
        return reward
    finally:
        await env.close()


async def check_family(family: str, seed: int) -> None:
    assert await outcome(family, seed, solve=True) == 1.0, f"{family}, seed {seed}: the solution fails"
    assert await outcome(family, seed, solve=False) == 0.0, f"{family}, seed {seed}: doing nothing passes"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("family", list(FAMILIES)[::5])
async def test_env_terminal_a_task_is_solved_by_its_script_and_not_by_doing_nothing(
    keeper: Terminal, family: str
) -> None:
    await check_family(family, 1)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("family", list(FAMILIES))
async def test_env_terminal_every_family_is_solved_on_its_seeds(keeper: Terminal, family: str) -> None:
    for seed in range(8):
        await check_family(family, seed)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_env_terminal_the_script_succeeds_on_a_hundred_seeds_of_all_families(keeper: Terminal) -> None:
    for seed in range(100):
        await keeper.reset(seed)
        for action in keeper.solution():
            _, reward, *_ = await keeper.step(action)
        assert reward == 1.0, (seed, keeper._family)


def test_env_terminal_there_are_thirty_families_and_equal_random_numbers_make_equal_tasks() -> None:
    assert len(FAMILIES) >= 30
    for make in FAMILIES.values():
        assert make(Random(3)) == make(Random(3))
        assert len({make(Random(seed)).text + str(make(Random(seed)).files) for seed in range(20)}) > 1
        for seed in range(50):
            task = make(Random(seed))
            assert task.checks
            assert all(bool(check.path) != bool(check.command) for check in task.checks)


@pytest.mark.asyncio(loop_scope="module")
async def test_env_terminal_an_episode_is_judged_where_its_turns_end_and_hostile_commands_harm_nothing(
    keeper: Terminal,
) -> None:
    env = Terminal(families=["count_files"], max_turns=8, time_limit_s=1.0, max_output_chars=500)
    try:
        await env.reset(2)
        assert (await env.step(""))[1] == -0.1
        assert (await env.step("a\0b"))[1] == -0.1
        observation, *_ = await env.step("sleep 30")
        assert "wall time" in observation
        observation, *_ = await env.step("yes | head -c 100000")
        assert len(observation) < 600
        assert "left out" in observation
        await env.step("echo '\ud800'; exit 3")
        await env.step("```bash\nrm -rf / 2>/dev/null; kill -9 -1\n```")
        await env.reset(2)
        for _ in range(7):
            await env.step("x" * 50_000)
        *_, reward, ended, cut_off, info = await env.step(env.solution()[0])
        assert (reward, ended, cut_off, info["correct"]) == (1.0, False, True, True)
    finally:
        await env.close()


def test_env_terminal_another_one_is_spawned_fresh_and_never_in_the_same_state() -> None:
    env = Terminal(families=["count_files"], max_turns=3).spawn(max_turns=5)
    assert env.families == ["count_files"]
    assert env.max_turns == 5
    with pytest.raises(UnsupportedError, match="same state"):
        env.spawn(same_state=True)


def test_env_terminal_a_command_is_a_fenced_block_or_all_of_the_text() -> None:
    assert extract_command("I look:\n```bash\nls -l\ncat x\n```\nthen") == "ls -l\ncat x"
    assert extract_command("```sh\nls") == "ls"
    assert extract_command("  submit ") == SUBMIT
    assert extract_command("\ud800") == "?"
