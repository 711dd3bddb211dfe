"""Errors inside a trace by where they are raised: in a user's line, a model of transformers, or a library."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from hf_memopt.errors import IncompatibleLibrary, InputError
from hf_memopt.estimator.patches import trace_errors

MODEL = ("/lib/site-packages/transformers/models/llama/modeling_llama.py", "transformers.models.llama.modeling_llama")
CONFIG = ("/lib/site-packages/transformers/configuration_utils.py", "transformers.configuration_utils")
TORCH = ("/lib/site-packages/torch/nn/functional.py", "torch.nn.functional")
OTHER = ("/lib/site-packages/accelerate/state.py", "accelerate.state")
USER = ("/home/me/train.py", "__main__")


def outcome(error: Exception, *files: tuple[str, str], around=None, **context) -> str:
    """What becomes of an error that is raised in the last of these files, which call each other."""
    around = around or (lambda: trace_errors.explained(context.pop("fields", {}), **context))
    call, body, error.__traceback__ = None, "raise error", None
    for file, module in reversed((OTHER, *files)):
        if (file, module) == OTHER and body != "raise error":
            body = "with around():\n        call()"
        names = {"__name__": module, "call": call, "error": error, "around": around}
        exec(compile(f"def run():\n    {body}\n", file, "exec"), names)
        call, body = names["run"], "call()"
    with pytest.raises((InputError, IncompatibleLibrary)) as raised:
        call()
    return f"{type(raised.value).__name__}: {raised.value}"


def test_what_an_error_in_a_trace_means(subtests):
    batch, lacks = {"batch": ["input_ids", "labels"]}, AttributeError("'NoneType' object has no attribute 'x'")
    unexpected = TypeError("run() got an unexpected keyword argument 'num_cycles'")
    data, user = torch.ops.aten.nonzero.default, "/home/me/train.py, line 2"
    own = "; estimate_trainer() and dry-run take the batches of your own data"
    kwargs = {"fields": {"optim": "x", "lr_scheduler_kwargs": {"num_cycles": 2}}}
    for error, files, context, said in [
        (
            *(DataDependentOutputException(data), (USER, TORCH), {}),
            f"InputError: {user}, asks for values that only a real",
        ),
        (DynamicOutputShapeException(data), (MODEL, TORCH), {}, f"InputError: {MODEL[0]}, line 2, asks for values"),
        (ValueError("no"), (MODEL,), {}, "InputError: the job cannot be traced: no"),
        (ValueError("no"), (USER,), {}, f"InputError: the job cannot be traced: {user}: no"),
        (RuntimeError("no"), (USER, TORCH), {}, f"traced: {user} (raised in functional.py:2): no"),
        (RuntimeError("More elements 5 than buffer size 3"), (TORCH,), {}, "offload_param.buffer_size=3 is smaller"),
        (RuntimeError("More elements 5 than buffer size 3!"), (TORCH,), {}, "traced: More elements 5 than"),
        (
            *(KeyError("x"), (USER, TORCH), {}),
            f"InputError: the job cannot be traced: {user} (raised in functional.py:2): Key",
        ),
        (KeyError("x"), (MODEL,), batch, f"model type 'llama' cannot be trained on input_ids, labels: 'x'{own}"),
        (KeyError("x"), (MODEL,), {**batch, "own_batch": True}, "cannot be trained on input_ids, labels: 'x'"),
        (KeyError("x"), (MODEL, TORCH), batch, "IncompatibleLibrary: tracing fails in torch "),
        (lacks, (MODEL, TORCH), batch, "InputError: model type 'llama' cannot be trained on"),
        (KeyError("x"), (MODEL, CONFIG), batch, "InputError: model type 'llama' cannot be trained on"),
        (lacks, (TORCH,), batch, "IncompatibleLibrary: tracing fails in torch "),
        (TypeError("LlamaModel.forward() missing 1 argument"), (TORCH,), batch, "model type 'LlamaModel' cannot be"),
        (unexpected, (TORCH,), kwargs, f"InputError: lr_scheduler_kwargs.num_cycles: {unexpected}"),
        (
            *(unexpected, (TORCH,), {"fields": {"optim_args": "num_cycles"}}),
            "IncompatibleLibrary: tracing fails in torch ",
        ),
        (InputError("as it is"), (USER,), {}, "InputError: as it is"),
        (IncompatibleLibrary("as it is"), (USER,), {}, "IncompatibleLibrary: as it is"),
    ]:
        with subtests.test(said):
            found = outcome(error, *files, **dict(context))
            assert said in found and (own in found) == ("model type" in said and "own_batch" not in context)
    libraries = outcome(KeyError("x"), TORCH, OTHER, TORCH)
    assert libraries.index("torch ") < libraries.index("accelerate ") and "hf_memopt" not in libraries.split(":")[1]


def test_an_error_of_the_users_data_begins_with_what_it_is_of():
    def around():
        return trace_errors.users_code("the data")

    assert (
        outcome(KeyError("x"), USER, around=around) == "InputError: the data: /home/me/train.py, line 2: KeyError: 'x'"
    )
    assert outcome(KeyError("x"), TORCH, around=around) == "InputError: the data: KeyError: 'x'"
    assert outcome(InputError("as it is"), USER, around=around) == "InputError: as it is"
