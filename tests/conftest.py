"""Signals as a person at a terminal has them."""

import signal

import pytest

# A shell starts background jobs with SIGINT ignored, and children inherit that: tests of Ctrl-C would test nothing.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Whole runs are live too: side by side (pytest-xdist) they would count each other's bytes on the loopback."""
    for item in items:
        if item.path.name in ("test_run.py", "test_faults.py"):
            item.add_marker(pytest.mark.live)
