"""Compile the DeepSpeed operators that tests use: DS_ACCELERATOR=cpu python operators.py

In one process, which imports DeepSpeed once. Not at the same time: a compiler runs for every file of an operator, and
each takes 1.5 GB.
"""

import traceback

from deepspeed.accelerator import get_accelerator


def main() -> None:
    load("CPUAdamBuilder")
    for name in ("ShareMemCommBuilder", "AsyncIOBuilder"):
        try:
            load(name)
        except Exception:  # of which there are many: no libaio's header, no such instructions
            traceback.print_exc()


def load(name: str) -> None:
    get_accelerator().create_op_builder(name).load()


if __name__ == "__main__":
    main()
