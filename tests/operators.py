"""Compile DeepSpeed operators: DS_ACCELERATOR=cpu python operators.py BUILDER …, of which the first must succeed.

In one process, which imports DeepSpeed once. Not at the same time: a compiler runs for every file of an operator, and
each takes 1.5 GB.
"""

import sys
import traceback

from deepspeed.accelerator import get_accelerator


def main(required: str, *others: str) -> None:
    load(required)
    for name in others:
        try:
            load(name)
        except Exception:  # of which there are many: no libaio's header, no such instructions
            traceback.print_exc()


def load(name: str) -> None:
    get_accelerator().create_op_builder(name).load()


if __name__ == "__main__":
    main(*sys.argv[1:])
