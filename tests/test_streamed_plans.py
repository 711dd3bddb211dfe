"""Plans with frozen weights in host memory: only where nothing else fits, and with as few of them as must be."""

import json
from dataclasses import replace

import pytest
from test_plan import config, least, planned, request_for

from hf_memopt import MemoryArguments
from hf_memopt.estimator.training_fields import checkpointing_period
from hf_memopt.planner.cost import Cost
from hf_memopt.planner.plan import usual_profile
from hf_memopt.planner.streaming import streaming_request


def test_which_jobs_may_stream():
    request = request_for(config(1), "lora", hardware="rtx_3060")
    asked = streaming_request(request)
    shares = {choice.streamed for choice in asked.choices()}
    assert max(shares) == 1 and min(shares) > 0
    assert not any(choice.streamed for choice in request.choices())
    assert all(choice.offloads and choice.memory_fields()["weight_streaming"] for choice in asked.choices())
    on = MemoryArguments(weight_streaming=True)
    for other in (
        request_for(config(1), "full", hardware="rtx_3060"),
        request_for(config(1), "lora"),  # a CPU
        request_for(config(1), "lora", hardware="rtx_3060x2"),
        replace(request, memory_args=on),
        replace(request, more={"task": "dpo"}),
        asked,
    ):
        assert streaming_request(other) is None


def test_traces_hold_whole_patterns_of_streamed_layers():
    half = MemoryArguments(weight_streaming=True, weight_streaming_ratio=0.5)
    assert checkpointing_period({}, half) == 2
    assert checkpointing_period({"activation_checkpointing_kwargs": {"every_n_layers": 3}}, half) == 6
    assert checkpointing_period({}, replace(half, checkpoint_ratio=0.25)) == 4


@pytest.mark.slow
def test_weights_are_streamed_where_nothing_else_fits():
    deep = config(12, hidden_size=512, intermediate_size=2048, vocab_size=200)
    request = request_for(deep, "lora", 64, hardware="rtx_3060", batch=2)
    resident, streamed = least(request), least(streaming_request(request))
    assert streamed < resident
    made = planned(request, (resident + streamed) / 2 / 0.94)
    assert made.ladder and all(rung.choice.streamed for rung in made.ladder)
    assert any("all weights on the device" in one.settings for one in made.rejected)
    answer = json.loads(json.dumps(made.to_dict()))["ladder"][-1]
    assert answer["memory_arguments"]["weight_streaming"] and "host memory" in answer["settings"]
    search = made.request.search(lambda text: None)
    choice = usual_profile(made.ladder).choice
    waits = search.cost.copying(choice) > Cost(search.sketch)._micro(choice)
    assert waits == any(note.startswith("the link to host memory bounds") for note in made.notes)
