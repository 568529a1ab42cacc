"""Signals as a person at a terminal has them."""

import signal

import pytest

# A shell starts background jobs with SIGINT ignored, and children inherit that: tests of Ctrl-C would test nothing.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """Side by side (pytest-xdist): what pulls or starts engines stays on one worker, as do the cells of a notebook.

    Two pulls at once would count each other's bytes on the loopback interface.
    """
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.xdist_group(item.path.name))
        elif item.get_closest_marker("live") or item.path.name in ("test_run.py", "test_faults.py"):
            item.add_marker(pytest.mark.xdist_group("live"))
