"""Two real processes over gloo, forked from one that has imported everything; a case for each line of its input.

python two_processes.py FOLDER < cases, a case being JSON: {"name", "rank", "phase", "step", "micro"}; writes NAME.json
with the exit codes ("hangs" where there is none after minutes) and what the first process was left with. Of a case
with "machines", each process is the first of its machine and has a folder of its own.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from functools import wraps
from pathlib import Path

import torch
from small_runs import llama, train

from hf_memopt import MemoryTrainer, TrainingOutOfMemory
from hf_memopt.levers import activation_compression, weight_streaming

_HANGS = 240  # seconds, far beyond what a case takes on a busy machine
FIELDS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 5}


def failing(case):
    """One process runs out of memory once, in one phase of one micro-batch of one step."""

    def prepare(trainer):
        if case.get("stream_waits"):  # as under NCCL, for which two devices would be needed
            trainer._peers.wait_on_host = False
        if case["phase"] is None or trainer.args.process_index != case["rank"]:
            return
        count = {"forward": 0, "backward": 0, "pre-hook": 0}
        begin = (case["step"] * 2 + case["micro"]) + 1

        def strikes(phase: str) -> bool:
            count[phase] += 1
            return phase == case["phase"] and count[phase] == begin

        forward, backward = trainer.model.forward, trainer.accelerator.backward

        @wraps(forward)
        def forward_or_fail(*args, **kwargs):
            if case["phase"] == "KeyError" and trainer.state.global_step == case["step"]:
                raise KeyError("nothing to do with memory")
            if strikes("forward"):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return forward(*args, **kwargs)

        @wraps(backward)
        def backward_or_fail(loss, **kwargs):
            if strikes("backward"):
                weight = trainer.model.model.layers[1].mlp.down_proj.weight  # half of the gradients are there

                def fail(_):
                    hook.remove()
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

                hook = weight.register_hook(fail)
            return backward(loss, **kwargs)

        def fails_in_a_hook(*_):
            if strikes("pre-hook"):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        if case["phase"] == "pre-hook":
            trainer.model.register_forward_pre_hook(fails_in_a_hook)
            return
        trainer.model.forward, trainer.accelerator.backward = forward_or_fail, backward_or_fail
        for phase, (holder, name) in PHASES.items():
            if case["phase"] == phase:
                _fail_in(holder(trainer), name, trainer, case)

    return prepare


PHASES = {
    "data": (lambda trainer: trainer, "data_collator"),
    "clipping": (lambda trainer: trainer.accelerator, "clip_grad_norm_"),
    "eval": (lambda trainer: trainer, "prediction_step"),
    "save": (lambda trainer: trainer, "_save_optimizer_and_scheduler"),
    "save of random states": (lambda trainer: trainer, "_save_rng_state"),
}


def _fail_in(holder, name: str, trainer, case) -> None:
    """A function that finds no memory at a step, as often as the case says, and otherwise does what it did."""
    usual, left = getattr(holder, name), [case.get("times", 1)]

    def fails(*args, **kwargs):
        if trainer.state.global_step == case["step"] and trainer.is_in_train and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return usual(*args, **kwargs)

    setattr(holder, name, fails)


def failing_optimizer(case):
    """An optimizer whose step finds no memory: before it writes anything, or when it has written one weight."""

    class Fails(torch.optim.AdamW):
        taken, left = 0, case.get("times", 1)

        def step(self, closure=None):
            rank = int(os.environ["RANK"])
            if self.taken == case["step"] and rank == case["rank"] and self.left:
                self.left -= 1
                if case["phase"] == "optimizer midway":
                    self.param_groups[0]["params"][0].data.add_(1.0)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            self.taken += 1
            return super().step(closure)

    Fails.__module__ = "torch.optim.adamw"  # of which it is known that it writes through the dispatcher alone
    return Fails


def frozen_layers():
    model = llama(torch.float32)
    model.model.layers.requires_grad_(False)
    return model


def with_optimizer(optimizer_class):
    class Trainer(MemoryTrainer):
        def create_optimizer(self, *args, **kwargs):
            self.optimizer = optimizer_class(self.model.parameters(), lr=self.args.learning_rate, weight_decay=0.0)
            return self.optimizer

    return Trainer


def child(case, rank: int, port: int, folder: Path) -> None:
    machines = bool(case.get("machines"))
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK="0" if machines else str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="1" if machines else "2",
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
    resumed = case.get("resumed")
    more = {}
    if "memory" in case:  # no tensor of the small model is large enough to be compressed, and none is in fp64
        activation_compression._SMALLEST = 128
        more = {"model": lambda: llama(torch.float32), "memory": case["memory"], "optim": "sgd"}
    if case.get("frozen"):  # a stand-in for a device with memory of its own: copies to and from it come at once
        weight_streaming.make_lanes = lambda _: weight_streaming.LanesAtOnce()
        more["model"] = frozen_layers
    if "loss_reduction" in case:
        more["memory"] = {"loss_reduction": case["loss_reduction"]}
    more |= case.get("fields", {})
    if str(case["phase"]).startswith("optimizer"):
        more["kind"] = with_optimizer(failing_optimizer(case))
    if "trl" in case:
        trl_child(case, rank, folder)
        return
    output = folder / f"machine{rank}" / case["name"] if machines else folder / (resumed or case["name"])
    done = train(output, prepare=failing(case), resume=bool(resumed), **{**FIELDS, **more})
    if rank == 0:
        torch.save(done.weights, folder / f"{case['name']}.pt")
    watching = [thread.name for thread in threading.enumerate() if thread.name == "hf_memopt peers"]
    assert not watching, "a thread that is in the store when the interpreter ends aborts the process"
    limits = [event["micro_batch_after"] for event in done.events if "micro_batch_after" in event]
    (folder / f"{case['name']}-{rank}.events").write_text(json.dumps(limits))


def trl_child(case, rank: int, folder: Path) -> None:
    """A run of one of TRL's trainers; the first process writes its weights and what it logged."""
    sys.path.append(str(Path(__file__).parent / "trainer"))
    import test_trl

    trainer, weights, _ = test_trl.train(
        folder / case["name"], case["trl"], memory=case.get("memory", True), prepare=failing(case), max_steps=5
    )
    if rank == 0:
        torch.save(weights, folder / f"{case['name']}.pt")
        (folder / f"{case['name']}.logs").write_text(json.dumps(trainer.state.log_history))
    events = [event["micro_batch_after"] for event in getattr(trainer, "memory_events", [])]
    (folder / f"{case['name']}-{rank}.events").write_text(json.dumps(events))


def run(case, folder: Path) -> None:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    began, children = time.monotonic(), []
    for rank in range(2):
        if (number := os.fork()) == 0:
            code = 1
            try:
                child(case, rank, port, folder)
                code = 0
            except TrainingOutOfMemory as end:
                code = end.exit_code
            except Exception:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(number)
    codes = {}
    while len(codes) < 2 and time.monotonic() < began + _HANGS:
        for rank, number in enumerate(children):
            if rank not in codes and (ended := os.waitpid(number, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(ended[1])
        time.sleep(0.05)
    for rank, number in enumerate(children):
        if rank not in codes:
            os.kill(number, 9)
            os.waitpid(number, 0)
    ended = {"codes": [codes.get(rank, "hangs") for rank in range(2)]}
    (folder / f"{case['name']}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        run(json.loads(line), Path(sys.argv[1]))
