"""What can go wrong, as exit codes and as exceptions that carry one clear line.

The exit codes are one table for all verbs:

====  =======================================================
0     done
1     the run or the check failed
2     bad input or usage
3     the transport was not determined
4     the transport contradicts the arm's label or ``--expect``
130   interrupted
====  =======================================================
"""

from __future__ import annotations

DONE = 0
FAILED = 1
BAD_INPUT = 2
NOT_DETERMINED = 3
CONTRADICTED = 4
INTERRUPTED = 130

#: outcome in manifest.json and on the last stdout line -> exit code
OUTCOME_EXIT = {
    "completed": DONE,
    "failed": FAILED,
    "contradicted": CONTRADICTED,
    "interrupted": INTERRUPTED,
}


class KvlabError(Exception):
    """An error a person can act on: the message says what is wrong, where, and what to do."""

    exit_code = FAILED

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the one line, not where in kvlab it was raised."""
        return [f"{type(self).__name__}: {self}"]


class Interrupted(KeyboardInterrupt):
    """The person (Ctrl-C, JupyterLab's stop button) or the system ended a measurement."""

    _render_traceback_ = KvlabError._render_traceback_


class BadInput(KvlabError):
    """The user's input (a parameter, a file, a flag) cannot be used as it is."""

    exit_code = BAD_INPUT


class RunFailed(KvlabError):
    """The experiment started and could not finish."""

    exit_code = FAILED


class Contradicted(KvlabError):
    """The evidence names another transport than the label claims."""

    exit_code = CONTRADICTED
