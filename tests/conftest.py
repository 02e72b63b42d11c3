"""Makes Megatron importable on CPU before any test imports it."""

import os
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

warnings.filterwarnings("ignore")

from megatron_pulse.processes import without_collecting  # noqa: E402

with without_collecting():
    from megatron_pulse.integration.megatron import compat

    compat.install()
from tests.memory import collect_seldom  # noqa: E402
from tests.process import unchanged  # noqa: E402
from tests.ranks import share_server  # noqa: E402

# How long an example takes is no fault of it: a machine may have other work. A commit is judged by
# the same examples everywhere; to look for others: bash tests/run.sh --hypothesis-profile new
settings.register_profile("new", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("new"), derandomize=True)
settings.load_profile("same")

from tests.remembered import FOLDER, cache_small_chains, remember_analyses  # noqa: E402

FIRST = (
    *("launch", "integration", "runtime", "planner"),
    *("backbone", "benchmarks", "profile", "cli", "model_specs"),
)
"""Folders with the longest files: begun first, nothing waits for them at the end."""


SLOW = Path(__file__).with_name("slow.txt")
"""Node ids of slow tests, a line each, whose faults others beside them find too."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--slow``."""
    parser.addoption("--slow", action="store_true", help=f"run the tests of {SLOW.name} as well")


def pytest_configure(config: pytest.Config) -> None:
    """Processes that share the files of tests out share what their ranks are forked from."""
    config.addinivalue_line("markers", "gpu: skipped without one; launch/gpu_check.sh runs them")
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        share_server()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """All that tests import is imported here, and is no garbage that is to be looked through."""
    with without_collecting():
        result = yield
        collect_seldom()
    return result


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest first; the order within a folder stays. Slow ones are left out unless asked for.

    Who names one test by its id asks for it. A line of the list without a test is a fault.
    """
    slow = {line for line in SLOW.read_text().splitlines() if line}
    if config.args in (["tests"], [str(config.rootpath / "tests")]):
        gone = slow - {item.nodeid for item in items}
        if gone and not config.getoption("keyword") and not config.getoption("markexpr"):
            raise pytest.UsageError(f"{SLOW.name} lists tests that are gone: {sorted(gone)}")
    if not config.getoption("slow") and not any("::" in arg for arg in config.args):
        left_out = [item for item in items if item.nodeid in slow]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in slow]
    root = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(root).parts[0]
        return FIRST.index(folder) if folder in FIRST else len(FIRST)

    items.sort(key=place)


def _shared(factory: pytest.TempPathFactory) -> Path:
    """Folder that all processes of this session share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def schedule_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Schedules that tests find are kept for this session only, and nobody is told of runs.

    Processes of this session share derived chains.
    """
    folder, graphs = tmp_path_factory.mktemp("schedules"), _shared(tmp_path_factory) / "graphs"
    graphs.mkdir(exist_ok=True)
    (folder / "graphs").symlink_to(graphs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PULSE_CACHE_DIR", str(folder))
        patch.setenv("WANDB_MODE", "disabled")  # as commands that need Megatron set it
        yield folder


@pytest.fixture(scope="session", autouse=True)
def remembering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes of this session share what ``tests.remembered`` keeps."""
    folder = _shared(tmp_path_factory) / "remembered"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        remember_analyses()
        cache_small_chains()
        yield


@pytest.fixture(autouse=True)
def unchanged_process() -> Iterator[None]:
    """Every test leaves the process to the next as it was."""
    with unchanged():
        yield


@pytest.fixture(autouse=True, scope="module")
def no_groups() -> Iterator[None]:
    """A file of tests leaves no process group to the next: commands leave theirs to the end of
    their process, fixtures' too."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    yield
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
