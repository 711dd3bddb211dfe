"""How many processes commands start, and what edits write, over grids of them, frozen."""

import itertools
from types import SimpleNamespace

import frozen

from hf_memopt.errors import InputError
from hf_memopt.foreign import accelerate, edits, key_table, launchers, migrate, source
from hf_memopt.foreign.key_table import list_tables
from hf_memopt.job.spec import JobSpec


def answered(function, *args):
    """What a function returns, or the sentence that refuses it."""
    try:
        return function(*args)
    except InputError as error:
        return f"error: {error}"


def frozen_texts(name: str, found: dict) -> None:
    frozen.check(name, {str(key): str(value) for key, value in found.items()})


def test_processes_of_launches():
    visible = ({}, {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "0,1, 2,"}, {"HIP_VISIBLE_DEVICES": "1,2"})
    visible += ({"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": " -1"}, {"CUDA_VISIBLE_DEVICES": "$GPUS"})
    options = {
        "accelerate": (
            *({}, {"num_processes": 4}, {"num_processes": "4"}, {"num_processes": 0}, {"gpu_ids": "all"}),
            *({"num_processes": True}, {"gpu_ids": "0,1"}, {"gpu_ids": "0,1", "config_file": "a"}),
        ),
        "torchrun": (
            *({}, {"nproc_per_node": 2}, {"nproc_per_node": 2, "nnodes": 3}, {"nnodes": "1:4"}),
            *(
                {"nproc_per_node": "gpu"},
                {"nproc_per_node": "auto", "nnodes": 2},
                {"nproc_per_node": 2, "nnodes": "$N"},
            ),
            *({"nproc_per_node": "x"}, {"nproc_per_node": 1.5}, {"nnodes": 0, "nproc_per_node": 2}),
        ),
        "deepspeed": (
            *({}, {"include": "localhost:0,1@host:2"}, {"i": "a:3"}, {"include": "localhost"}, {"num_gpus": 2}),
            *({"num_gpus": 0}, {"num_accelerators": 3, "num_nodes": 2}, {"num_nodes": 2}),
        ),
        "torchtune": ({}, {"nproc_per_node": 2}),
        "python": ({},),
    }
    found = {}
    for by, asked in options.items():
        for one, seen in itertools.product(asked, visible):
            launch = launchers.Launch(by, one)
            found[f"{by} {one} {seen}"] = answered(launchers.count_processes, launch, seen)
    variables = (
        *({}, {"FORCE_TORCHRUN": "1"}, {"FORCE_TORCHRUN": "Y"}, {"FORCE_TORCHRUN": "0"}, {"NPROC_PER_NODE": "4"}),
    )
    variables += ({"NNODES": "2"}, {"NNODES": "2", "NPROC_PER_NODE": "4"}, {"RDZV_ID": "1"}, {"MIN_NNODES": "1"})
    variables += ({"RDZV_ID": "1", "MIN_NNODES": "1"}, {"NNODES": "1:2"}, {"OPTIM_TORCH": "0", "NPROC_PER_NODE": "2"})
    for by, one, seen in itertools.product(("LLaMA-Factory", "ms-swift"), variables, visible[:4]):
        found[f"{by} {one} {seen}"] = answered(launchers.count_processes, launchers.Launch(by), one | seen)
        settings: dict = {}
        ours = answered(source._surroundings, settings, launchers.Launch(by), one | seen | {"OTHER": "3"})
        found[f"{by} around {one} {seen}"] = [ours, settings]
    for text in ("", "expandable_segments:True", "max_split_size_mb:9", "expandable_segments:False, a:b,,c:d"):
        environment = {"PYTORCH_CUDA_ALLOC_CONF": text, "NNODES": "2", "FORCE_TORCHRUN": "1"}
        found[f"allocator {text}"] = launchers.allocator_setting(environment)
        settings = {}
        found[f"allocator of python {text}"] = [
            source._surroundings(settings, launchers.Launch("python"), environment),
            settings,
        ]
    for words in (
        *(
            "python a.py --x",
            "python3.11 -m torch.distributed.run --nproc_per_node 2 a.py",
            "python -m trl sft",
            "./a.py",
        ),
        *(
            "accelerate launch --num_processes=2 --multi-gpu a.py --b",
            "accelerate --cpu a.py",
            "torchrun --standalone",
        ),
        *(
            "/usr/bin/torchrun --nnodes=1 --rdzv-backend c10d -- a.py",
            "python -m",
            "deepspeed --module x.y",
            "python -u -W a b.py",
        ),
    ):
        found[words] = answered(launchers.split_launch, words.split())
    for by, name in itertools.product(("torchrun", "accelerate", "python", "other"), ("nnodes", "standalone", "new")):
        found[f"unknown {by} {name}"] = answered(launchers.refuse_unknown, launchers.Launch(by, {name: 1}))
    for word in ("1:2", "1", "true", "[1, 2]", "a: b: c", "1:2:3", "x", ""):
        found[f"value {word}"] = repr(launchers.argument_value(word))
    frozen_texts("foreign_processes", found)


def test_engines_of_accelerate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, file = {}, tmp_path / "a.yaml"
    for options in (
        *(
            *({}, {"mixed_precision": "fp8"}, {"mixed_precision": "bf16", "num_processes": 2}, {"use_cpu": True}),
            {"cpu": False},
        ),
        *(
            *({"dynamo_backend": "no"}, {"dynamo_backend": "inductor"}, {"tpu": "NO"}, {"use_deepspeed": True}),
            {"gpu_ids": 1},
        ),
        *({"use_deepspeed": True, "zero_stage": 3}, {"use_deepspeed": True, "offload_param_device": "cpu"}),
        *({"use_deepspeed": True, "deepspeed_config_file": "x"}, {"use_fsdp": True, "fsdp_version": 2}, {"new": 1}),
        *(
            {"use_deepspeed": True, "deepspeed_config_file": "x", "zero_stage": 0},
            {"use_fsdp": True},
            {"use_fsdp": False},
        ),
        *(
            {"use_deepspeed": True, "gradient_clipping": 0.5, "gradient_accumulation_steps": 3, "zero_stage": "1"},
            {"fp8_x": 1},
        ),
    ):
        found[str(options)] = answered(accelerate.engine_of_launch, None, options)
    for size, shards, processes, kind in itertools.product((1, 2, "2"), (1, 4), (None, 2, 8), ("cp", "sp")):
        own = {f"parallelism_config_{kind}_size": size, "parallelism_config_dp_shard_size": shards}
        own |= {"num_processes": processes} | ({"use_fsdp": True} if kind == "cp" else {"use_deepspeed": True})
        found[f"{kind} {size!r} × {shards} of {processes}"] = answered(accelerate._shared, own, "here")
    for content in (
        *(
            "distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: true, version: 2}\n",
            "distributed_type: 'NO'\n",
        ),
        *(
            "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {zero_stage: 3}\n",
            "distributed_type: TPU\n",
        ),
        *("distributed_type: MULTI_GPU\nparallelism_config:\nmixed_precision: bf16\n", "a: 1\n", "[1]\n"),
    ):
        file.write_text(content)
        both = answered(accelerate.engine_of_launch, file, {}), answered(accelerate._of_file, file)
        found[content] = str(both).replace(str(tmp_path), "")
    keys = (
        *("config_file", "accelerate_config", "gradient_clipping", "num_processes", "fsdp_config", "fsdp_version"),
        "debug",
    )
    found["keys"] = [accelerate.is_launch_option(key) for key in (*keys, "seed", "zero_stage", "use_cpu", "tpu_name")]
    deepspeed = {"training": {"deepspeed": {"stage": 3}}, "world_size": 2}
    for fields in (
        *(
            *({}, {"world_size": 2}, {"world_size": 1}, {"sequence_parallel": 2}, deepspeed),
            {"training": {"fsdp": "full_shard"}},
        ),
        {"world_size": 4, "training": {"fsdp": "full_shard", "fsdp_config": {"cpu_offload": True, "version": 1}}},
        {"training": {"fsdp": "full_shard", "fsdp_config": {"mixed": True}}},
    ):
        spec = JobSpec(model="m", **fields)
        for path in (None, tmp_path / "a b.json"):
            words = answered(migrate.accelerate_words, spec, path)
            found[f"{fields} {bool(path)}"] = str(words).replace(str(tmp_path), "")
    translation = SimpleNamespace(run={"dataset_name": "d", "seed": None})
    for fields in (
        *({}, {"packed": True}, {"packed": True, "task": "dpo"}, {"packed": True, "task": "sft", "dtype": "auto"}),
        *({"sizes": {"vocab_size": 1}}, {"method": "lora", "quantization": {"load_in_8bit": True}, "lora": {"r": 3}}),
        *({"method": "qlora", "quantization": {"bnb_4bit_quant_type": "nf4"}, "lora": {"r": 3}}, {"task": "kto"}),
        {"training": {"deepspeed": {}, "seed": 4, "per_device_eval_batch_size": 3, "bf16": True}, "seq_len": 128},
    ):
        spec = JobSpec(model="m", **{"method": "full", **fields})
        values = answered(migrate.recipe_arguments, spec, translation)
        words = values if isinstance(values, str) else " ".join(migrate.as_words(values))
        found[f"recipe {fields}"] = [words, str(answered(migrate.recipe_of, spec)).rpartition("/")[2]]
    frozen_texts("foreign_engines", found)


def test_words_of_tables():
    found, values = {}, (None, True, False, "", "none", "False", 0, 1, 2, "3", [], {}, ["a"], " Bf16 ")
    for value in values:
        found[f"value {value!r}"] = [key_table.as_text(value), key_table.is_off(value)]
        wanted = ("set", "unset", "several", "true", [True, 2], 1, "bf16")
        found[f"matches {value!r}"] = [key_table._matches(value, one) for one in wanted]
    settings = {"gpu_a": 0, "gpu_b": 2, "gpu": 5, "other": True}
    found["families"] = [
        key_table._setting(key, settings) for key in ("gpu*", "gpu_*", "gpu_a", "x*", "other", "none")
    ]
    ours = {
        "strategy": ("none", "ddp", "zero2", "zero3", "fsdp2", "zero3_offload_cpu"),
        "training.optim": ("adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"),
    }
    for name, table in list_tables().items():
        found[f"{name} features"] = [sorted(table.features()), table.launched]
        for setting in table.plan:
            asked = ours.get(setting, (True, False, 2))
            found[f"{name} {setting}"] = [answered(table.theirs, setting, value) for value in asked]
        keys = [row.key for row in table.rows][:: max(1, len(table.rows) // 12)]
        found[f"{name} rows"] = [
            (key, table.reads_null(key), table.inside(key), len(table.rows_of(key))) for key in keys
        ]
        assert [table.place(table.rows[0].key), table.place("no such key")] == [0, len(table.rows)]
        assert not any(
            row.is_switch and (row.to or row.values or row.only or row.effect == "memory") for row in table.rows
        )
    frozen_texts("foreign_tables", found)


def test_edited_texts():
    found = {}
    texts = {
        "flat": "a: 1\nb: &x [1, 2]  # two\nc:\nd: {e: 1, f: {}}\n",
        "block": "a:\n  b: 1\n  c:\n  - x\n  - y\n# end\nlast: 'q'",
        "empty": "{}\n",
        "one": "a: {}",
    }
    for (name, text), key, value in itertools.product(
        texts.items(),
        ("a", "a.b", "a.c", "a.new", "b", "c", "d.e", "d.f", "d.f.g", "new", "new.one", "last"),
        (None, 3, True, "x y", ["z", 1]),
    ):
        made = edits._edit_yaml(text, key, value)
        found[f"{name} {key} {value}"] = made
    for style, value in itertools.product(
        ("--{key} {value}", "key=value", edits._DASHES), (None, True, 3, "a b", "x")
    ):
        found[f"written {style} {value}"] = edits._written(style, "some_key", value)
    for text in ("a", "a\n", None):
        found[f"diff {text!r}"] = edits.diff(SimpleNamespace(path=None, text="a\nb"), text)
    frozen_texts("foreign_edits", found)
