"""One module an experiment: ``measure(params, run)`` fills the run folder's tables."""
