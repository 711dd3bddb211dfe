"""`hf-memopt consolidate`: a sharded checkpoint as one model."""

from hf_memopt.cli.output import print_json, working
from hf_memopt.trainer.checkpoints.consolidation import consolidate


def run_consolidate(checkpoint, directory, trusted, as_json) -> None:
    """Write the model and say which files it has."""
    working(f"merging the shards of {checkpoint}")
    files = consolidate(checkpoint, directory, trusted)
    if as_json:
        print_json({"directory": str(directory), "files": files})
    else:
        print(f"wrote {', '.join(files)} to {directory}")
