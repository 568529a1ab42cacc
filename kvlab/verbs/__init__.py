"""One module a command-line verb: ``configure(parser)`` and ``main(args) -> exit code``."""
