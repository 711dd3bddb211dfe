"""A process of `accelerate launch`: two steps of a script, and the most bytes that its live tensors took in train().

accelerate launch … benchmarks/launched_rank.py FOLDER SCRIPT ARGUMENTS

Rank N writes FOLDER/N.json. The allocator's events would not do: some buffers of gloo are freed on threads of its own,
which torch's profiler does not see.
"""

import json
import os
import sys
from pathlib import Path

from script_truth import measure

from hf_memopt.estimator.accounting.ledger import Ledger


def main(folder: str, script: str, arguments: list[str]) -> None:
    with Ledger() as ledger:

        def peak(trainer, train) -> int:
            ledger.moments.clear()
            train()
            return max(found.total for found in ledger.peaks.values())

        found = measure(script, arguments, peak)
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
