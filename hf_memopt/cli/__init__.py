"""The command line, `hf-memopt`. Results go to stdout, everything else to stderr.

Exit codes: 0 done, 1 the answer is no, 2 bad input.
"""

from hf_memopt.cli.app import main

__all__ = ["main"]
