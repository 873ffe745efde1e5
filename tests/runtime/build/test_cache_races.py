"""The cache under many processes at once and under kill -9."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path

import fakes
import pytest

from attnforge.codegen.render import Source
from attnforge.runtime.build import cache, store
from attnforge.runtime.build.errors import CacheError
from attnforge.runtime.build.settings import CACHE_DIR

# Children are forked from a small server: no torch, no threads, milliseconds each.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["attnforge.runtime.build.cache", "attnforge.runtime.build.nvrtc", "fakes"])

PATIENCE = 30.0  # seconds after which a child counts as hanging
SOURCES = tuple(fakes.source(f"void f{number}();\n") for number in range(4))


@pytest.fixture
def env(tmp_path: Path, cache_dir: Path) -> dict[str, str]:
    """Environment of the children: a slow stub compiler and the cache of this test."""
    return {CACHE_DIR: str(cache_dir), "CXX": str(fakes.compiler(tmp_path, seconds=0.05).path)}


def start(target: Callable[..., None], env: dict[str, str], *arguments: object) -> BaseProcess:
    process = SERVER.Process(target=run, args=(target, env, arguments))
    process.start()
    return process


def run(target: Callable[..., None], env: dict[str, str], arguments: tuple[object, ...]) -> None:
    os.environ.update(env)
    target(*arguments)


def finish(*processes: BaseProcess) -> None:
    """Wait; a child that hangs or fails is a failure."""
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            pytest.fail(f"a child still ran after {PATIENCE} s")
        assert process.exitcode == 0


def obtain(*sources: Source) -> None:
    for source in sources:
        assert cache.obtain(source).binary == source.text.encode()


# ---- At once


def obtain_together(barrier: Barrier, order: int) -> None:
    barrier.wait(PATIENCE)
    obtain(*random.Random(order).sample(SOURCES, len(SOURCES)))


def test_sixteen_processes_compile_each_key_once(
    env: dict[str, str], tmp_path: Path, cache_dir: Path
) -> None:
    barrier = SERVER.Barrier(16)
    finish(*(start(obtain_together, env, barrier, order) for order in range(16)))
    assert len((tmp_path / "compiles.log").read_text().splitlines()) == len(SOURCES)
    assert len(cache.entries()) == len(SOURCES)
    assert not list((cache_dir / "tmp").iterdir())


def no_locks(fd: object, operation: int) -> None:
    raise OSError(errno.ENOLCK, "no locks available")


def obtain_without_locks(barrier: Barrier) -> None:
    fcntl.flock = no_locks  # this process ends with the test
    barrier.wait(PATIENCE)
    obtain(*SOURCES)


def test_without_locks_all_are_right_too(env: dict[str, str], cache_dir: Path) -> None:
    """Where there is no flock everybody compiles, one publishes, and nobody sees a half."""
    barrier = SERVER.Barrier(8)
    finish(*(start(obtain_without_locks, env, barrier) for _ in range(8)))
    assert len(cache.entries()) == len(SOURCES)


def obtain_for(seconds: float) -> None:
    end, right = time.monotonic() + seconds, 0
    while time.monotonic() < end or not right:
        try:
            obtain(*SOURCES)
            right += 1
        except CacheError as error:  # all builds of one call met `damage_for`: an error, never wrong bytes
            if f"damaged after each of {store.ATTEMPTS} builds" not in str(error):
                raise


def clear_for(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        cache.clear()
        time.sleep(0.02)


def damage_for(seconds: float) -> None:
    end, chance = time.monotonic() + seconds, random.Random(0)
    while time.monotonic() < end:
        for entry in cache.entries():
            try:
                with (entry.directory / chance.choice(("kernel.so", "meta.json"))).open("r+b") as file:
                    file.write(b"damage")
            except FileNotFoundError:
                pass  # moved aside meanwhile
        time.sleep(0.05)


@pytest.mark.parametrize("enemy", [clear_for, damage_for])
def test_readers_survive_clearing_and_damage(enemy: Callable[..., None], env: dict[str, str]) -> None:
    env = env | {"CXX": str(fakes.compiler(Path(env["CXX"]).parent, seconds=0).path)}
    finish(*(start(obtain_for, env, 1.5) for _ in range(4)), start(enemy, env, 1.5))


# ---- kill -9


def die_at(number: int) -> None:
    """Kill this process at the `number`-th file, lock or process operation of `obtain`."""
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event.partition(".")[0] in ("open", "os", "fcntl", "subprocess", "tempfile", "shutil"):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    obtain(SOURCES[0])


def test_killed_at_every_step_the_next_run_is_right(env: dict[str, str], cache_dir: Path) -> None:
    env = env | {"CXX": str(fakes.compiler(Path(env["CXX"]).parent, seconds=0).path)}
    for number in range(1, 400):
        process = start(die_at, env, number)
        process.join(PATIENCE)
        finished = process.exitcode == 0
        assert finished or process.exitcode == -signal.SIGKILL
        assert not swept(env, cache_dir), f"left behind after a kill at step {number}"
        if finished:
            assert number > 30, "the hook saw too few operations to prove anything"
            return
        cache.clear()
    pytest.fail("obtain never got through")


def swept(env: dict[str, str], cache_dir: Path) -> list[Path]:
    """What is left under tmp/ after this process read or rebuilt, and built something new."""
    store._swept.clear()  # as in a new process
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", env["CXX"])
        obtain(SOURCES[0], fakes.source(f"void g{time.monotonic_ns()}();\n"))
    return list((cache_dir / "tmp").iterdir())


def test_killed_at_random_times_the_next_run_is_right(env: dict[str, str], cache_dir: Path) -> None:
    chance = random.Random(20261121)
    killed = 0
    for _ in range(15):
        group = [start(obtain, env, *SOURCES) for _ in range(2)]
        time.sleep(chance.uniform(0, 0.25))
        for process in group:
            process.kill()
            process.join()
            killed += process.exitcode == -signal.SIGKILL
        finish(start(obtain, env, *SOURCES[:2]))
        cache.clear()
    assert killed > 10
    time.sleep(0.1)  # compilers of the killed ones end
    assert not swept(env, cache_dir)


def test_leftovers_of_other_machines_wait_for_their_age(env: dict[str, str], cache_dir: Path) -> None:
    finish(start(obtain, env, SOURCES[0]))
    young, old = (cache_dir / "tmp" / f"otherone-{name}" for name in ("young", "old"))
    young.mkdir()
    old.mkdir()
    (old / "kernel.cpp").touch()
    os.utime(old, (0, 0))
    assert swept(env, cache_dir) == [young]
