"""Signals as a person at a terminal has them."""

import signal

# A shell starts background jobs with SIGINT ignored, and children inherit that: tests of Ctrl-C would test nothing.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
