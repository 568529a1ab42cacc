"""Where a process runs: this machine, a shaped network link, a Ray cluster."""
