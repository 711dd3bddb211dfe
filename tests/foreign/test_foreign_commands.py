"""Shell commands of other tools: what each says, or the one sentence that refuses it. No word is dropped."""

import json

import pytest

from hf_memopt.cli.foreign import examine_foreign, read_job
from hf_memopt.data.builtin_model import builtin_model
from hf_memopt.errors import InputError
from hf_memopt.foreign.edits import changes, chosen_keys, edit, in_words
from hf_memopt.foreign.shell import _value
from hf_memopt.foreign.source import is_source, read_command, read_settings, read_source

_FILES = {
    "ax.yml": "base_model: Qwen/Qwen3-0.6B\ndatasets: [{path: a}]\nmicro_batch_size: 2\n",
    "lf.yaml": "model_name_or_path: Qwen/Qwen3-0.6B\ntemplate: qwen\ndo_train: true\ncutoff_len: 1024\n",
    "lf.json": json.dumps({"model_name_or_path": "Qwen/Qwen3-0.6B", "template": "qwen", "do_train": True}),
    "sw.yaml": "model: Qwen/Qwen3-0.6B\ntuner_type: lora\nmax_length: 512\n",
    "env.yaml": "model: Qwen/Qwen3-0.6B\ntuner_type: lora\nENV: {NPROC_PER_NODE: 4, NNODES: 2}\n",
    "trl.yaml": "model_name_or_path: Qwen/Qwen3-0.6B\ndataset_name: a\nmax_length: 512\n",
    "tune.yaml": """model: {_component_: torchtune.models.qwen3.qwen3_0_6b_instruct}
optimizer: {_component_: torch.optim.AdamW, fused: true, lr: 2e-5}
batch_size: 2
tokenizer: {max_seq_len: 512}
""",
    "acc.yaml": "distributed_type: MULTI_GPU\nnum_processes: 4\n",
    "two.yaml": "distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: 0,1\n",
    "inside/ax.yml": "base_model: Qwen/Qwen3-1.7B\ndatasets: [{path: a}]\n",
}
_BATCH, _STEPS = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"
_MODEL = "--model_name_or_path Qwen/Qwen3-0.6B"
_SWIFT = "swift sft --model Qwen/Qwen3-0.6B --max_length 512"
_OK = {"model": "Qwen/Qwen3-0.6B"}

# Command -> fields of ours, or words of the sentence that refuses it.
COMMANDS = {
    # Overrides after a file, as its tool reads them.
    "llamafactory-cli train lf.yaml per_device_train_batch_size=8 cutoff_len=8192": {_BATCH: 8, "seq_len": 8192},
    "llamafactory-cli train lf.json cutoff_len=256": {"seq_len": 256},
    "llamafactory-cli train lf.yaml --cutoff_len 8192": "after its file LLaMA-Factory reads KEY=VALUE",
    "llamafactory-cli train lf.yaml more.yaml": "after its file LLaMA-Factory reads KEY=VALUE",
    f"llamafactory-cli train {_MODEL} --do_train --cutoff_len 64": {"seq_len": 64},
    "llamafactory-cli train nonsense --cutoff_len 64": "LLaMA-Factory takes no word 'nonsense'",
    "lmf train lf.yaml": {"seq_len": 1024},
    "swift sft sw.yaml --max_length 1024": {"seq_len": 1024, **_OK},
    "swift sft env.yaml --max_length 8": {"world_size": 8},
    "NPROC_PER_NODE=2 swift sft env.yaml --max_length 8": {"world_size": 4},
    "python -m swift.cli.sft sw.yaml": "takes no word 'sw.yaml'",
    "python scripts/run_sft.py trl.yaml": {"seq_len": 512, **_OK},
    "python scripts/run_sft.py trl.yaml --max_length=64": {"seq_len": 64},
    "python trl/scripts/sft.py trl.yaml": "TRL takes no word 'trl.yaml'",
    "axolotl train ax.yml --micro-batch-size 4": {_BATCH: 4, **_OK},
    "axolotl train --micro-batch-size 4 ax.yml": {_BATCH: 4, **_OK},
    "axolotl train ax.yml other": "axolotl takes no word 'other'",
    "axolotl train ax.yml --micro-batch-size 4 5": "axolotl takes no word",
    # Prefixes.
    "uv run axolotl train ax.yml": _OK,
    "uv run --with flash-attn axolotl train ax.yml": _OK,
    "uvx --from axolotl axolotl train ax.yml": _OK,
    "uv run --env-file x axolotl train ax.yml": "ask about that",
    "env A=1 CUDA_VISIBLE_DEVICES=0,1 axolotl train ax.yml": {"world_size": 2},
    "nohup timeout 9h axolotl train ax.yml > log 2>&1 &": _OK,
    "conda run -n base axolotl train ax.yml": _OK,
    "srun -N 2 axolotl train ax.yml": "srun starts .* ask about that",
    "docker run --gpus all image axolotl train ax.yml": "docker starts .* ask about that",
    "bash -c 'cd x && swift sft --model a'": "bash starts .* ask about that",
    "ssh host swift sft --model a": "ssh starts .* ask about that",
    "echo swift sft; axolotl train ax.yml": _OK,
    "cd inside && axolotl train ax.yml": {"model": "Qwen/Qwen3-1.7B"},
    "cd nowhere && axolotl train ax.yml": "is not here",
    "export A=1 && axolotl train ax.yml": _OK,
    f"{_SWIFT}; echo done": {"seq_len": 512},
    f"{_SWIFT} | tee log": {"seq_len": 512},
    f"{_SWIFT} # --max_length 8": {"seq_len": 512},
    f"{_SWIFT} \\\n # a comment\n --max_length 8": "the line before it ends the command",
    "cat > x <<EOF\nswift sft --model a\nEOF\n" + _SWIFT: {"seq_len": 512},
    "MODEL=Qwen/Qwen3-0.6B; swift sft --model $MODEL --max_length 8": _OK,
    'ARGS=(--model Qwen/Qwen3-0.6B\n --max_length 8)\nswift sft "${ARGS[@]}"': {"seq_len": 8, **_OK},
    "ARGS='--model Qwen/Qwen3-0.6B --max_length 8'\nswift sft $ARGS": {"seq_len": 8, **_OK},
    "swift sft $ARGS --model Qwen/Qwen3-0.6B": r"takes no word '\$ARGS'",
    f"{_SWIFT} --deepspeed <(make x)": "no command is run",
    f'{_SWIFT} "$@"': {"seq_len": 512},
    # Launchers and modules.
    "python3 -m axolotl.cli.train ax.yml": _OK,
    "python -m llamafactory.cli train lf.yaml": {"seq_len": 1024},
    f"python -m trl.scripts.sft {_MODEL}": {"task": "sft"},
    f"python -m trl dpo {_MODEL}": {"task": "dpo"},
    f"accelerate launch -m trl.scripts.sft {_MODEL}": {"task": "sft"},
    "python -m swift.cli.sft --model Qwen/Qwen3-0.6B": _OK,
    "torchrun --nproc_per_node 2 src/train.py lf.yaml": {"world_size": 2, "seq_len": 1024},
    "accelerate launch --config_file acc.yaml src/train.py lf.yaml": {"world_size": 4, "seq_len": 1024},
    f"deepspeed --num_gpus 2 trl/scripts/sft.py {_MODEL}": {"world_size": 2, **_OK},
    f"deepspeed --include localhost:0,1,2 trl/scripts/sft.py {_MODEL}": {"world_size": 3},
    f"deepspeed --hostfile hosts trl/scripts/sft.py {_MODEL}": "hostfile",
    f"deepspeed --autotuning run trl/scripts/sft.py {_MODEL}": "autotuning='run': this option is not modelled",
    f"torchrun --min_nodes 2 trl/scripts/sft.py {_MODEL}": "min_nodes=2: this option is not modelled",
    "uv run --env-file=x axolotl train ax.yml": "ask about that",
    f"python -m torch.distributed.run --nproc-per-node=2 trl/scripts/sft.py {_MODEL}": {"world_size": 2},
    "accelerate launch --num_processes 2 -m axolotl.cli.train ax.yml": {"world_size": 2, **_OK},
    "torchrun --nproc_per_node=2 -m axolotl.cli.train ax.yml": {"world_size": 2},
    f"torchrun --nnodes=1:2 --nproc_per_node=2 trl/scripts/sft.py {_MODEL}": "nnodes=1:2: an elastic launch",
    f"torchrun --nproc_per_node=two trl/scripts/sft.py {_MODEL}": "nproc_per_node='two' is no number",
    f"torchrun trl/scripts/sft.py {_MODEL}": {"world_size": 1},
    # Devices.
    "CUDA_VISIBLE_DEVICES=0,1,2,3 llamafactory-cli train lf.yaml": {"world_size": 4, "expandable": True},
    "CUDA_VISIBLE_DEVICES=0 llamafactory-cli train lf.yaml": {"world_size": 1, "expandable": None},
    "FORCE_TORCHRUN=1 CUDA_VISIBLE_DEVICES=0 NNODES=2 llamafactory-cli train lf.yaml": {"world_size": 2},
    "NPROC_PER_NODE=8 NNODES=2 llamafactory-cli train lf.yaml": {"world_size": 16},
    "NPROC_PER_NODE=8 OPTIM_TORCH=0 llamafactory-cli train lf.yaml": {"world_size": 8, "expandable": None},
    "llamafactory-cli train lf.yaml": {"world_size": None, "expandable": None},
    "CUDA_VISIBLE_DEVICES=0,1\nllamafactory-cli train lf.yaml": {"world_size": None},  # not exported
    "export CUDA_VISIBLE_DEVICES=0,1\nllamafactory-cli train lf.yaml": {"world_size": 2},
    "CUDA_VISIBLE_DEVICES= llamafactory-cli train lf.yaml": "leaves no device",
    "USE_V1=1 llamafactory-cli train lf.yaml": "USE_V1",
    "CUDA_VISIBLE_DEVICES=0,1 axolotl train ax.yml": {"world_size": 2},
    "axolotl train ax.yml --launcher torchrun -- --nproc_per_node=2": {"world_size": 2},
    "CUDA_VISIBLE_DEVICES=0,1 axolotl train ax.yml --launcher python": "DataParallel",
    f"CUDA_VISIBLE_DEVICES=0,1 accelerate launch trl/scripts/sft.py {_MODEL}": {"world_size": 2},
    f"CUDA_VISIBLE_DEVICES=0,1 accelerate launch --config_file acc.yaml trl/scripts/sft.py {_MODEL}": {
        "world_size": 4
    },
    f"CUDA_VISIBLE_DEVICES=0,1 trl sft {_MODEL}": {"world_size": 2},
    f"CUDA_VISIBLE_DEVICES=0,1 python trl/scripts/sft.py {_MODEL}": "DataParallel",
    f"accelerate launch --gpu_ids 0,1 trl/scripts/sft.py {_MODEL}": "pass --num_processes",
    f"accelerate launch --config_file two.yaml trl/scripts/sft.py {_MODEL}": {"world_size": 2},
    f"NPROC_PER_NODE=2 trl sft {_MODEL}": {"world_size": None},  # which TRL does not read
    f"CUDA_VISIBLE_DEVICES=0,1 {_SWIFT}": "device_map='auto'",
    f"NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1 {_SWIFT}": {"world_size": 2},
    f"NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1,2,3 {_SWIFT}": "device_map='auto'",
    "axolotl train ax.yml --num-processes 4": {"world_size": 4},
    f"deepspeed --module trl.scripts.sft {_MODEL}": {"world_size": None, **_OK},
    f"NNODES=$WORLD NPROC_PER_NODE=8 {_SWIFT}": {"world_size": 8},
    f"NNODES=2 {_SWIFT}": {"world_size": 2},
    # The allocator.
    f"PYTORCH_ALLOC_CONF=expandable_segments:True {_SWIFT}": {"expandable": True},
    f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:512 {_SWIFT}": {"expandable": True},
    f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False {_SWIFT}": {"expandable": False},
    "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512 axolotl train ax.yml": {"expandable": False},
    # torchtune's overrides.
    "tune run full_finetune_single_device --config tune.yaml batch_size=4": {_BATCH: 4},
    "tune run full_finetune_single_device --config=tune.yaml": "in two words",
    "tune run full_finetune_single_device --config tune.yaml --batch_size 4": "torchtune reads KEY=VALUE",
    "tune run full_finetune_single_device --config tune.yaml ~optimizer.fused": {"training.optim": "adamw_torch"},
    "tune run full_finetune_single_device --config tune.yaml ~optimizer": "cannot|can be taken out",
    "tune run full_finetune_single_device --config tune.yaml ~nothing": "no such key",
    "tune run full_finetune_single_device --config tune.yaml "
    "optimizer=torchao.optim.CPUOffloadOptimizer optimizer.offload_gradients=True": {
        "memory.optimizer_cpu_offload": True
    },
    "tune run full_finetune_single_device --config tune.yaml batch_size.a=1": "batch_size is 2, which has no keys",
    "tune run --nproc_per_node 2 full_finetune_distributed --config tune.yaml": {"world_size": 2},
}


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)


def write_files(folder):
    for name, text in _FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_a_command_is_read_whole_or_refused(subtests):
    for text in COMMANDS:
        with subtests.test(text=text):
            expected = COMMANDS[text]
            assert is_source(text)
            if isinstance(expected, str):
                with pytest.raises(InputError, match=expected) as raised:
                    read_source(text).translate().check()
                assert "\n" not in str(raised.value)
                continue
            translation = read_source(text).translate()
            translation.check()
            assert {key: translation.fields.get(key) for key in expected} == expected


@pytest.mark.slow
def test_another_word_is_never_dropped(subtests):
    for text in [text for text in COMMANDS if not set(text) & set("\n;|&<#'\"$")]:
        with subtests.test(text=text):
            if isinstance(COMMANDS[text], str):
                continue
            words = text.split(" ")
            for at in range(len(words) + 1):
                for other in ("zzz", "--zzz=1", "zzz=1"):
                    try:
                        source = read_source(" ".join([*words[:at], other, *words[at:]]))
                        source.translate().check()
                    except InputError:
                        continue
                    assert "zzz" in str(source.settings), (other, at)


def test_what_no_tool_reads_is_named_as_without_effect():
    translation = read_source(f"NPROC_PER_NODE=2 trl sft {_MODEL}").translate()
    assert "env.NPROC_PER_NODE" in translation.neutral
    text = f"PYTORCH_ALLOC_CONF=expandable_segments:True,max_split_size_mb:512 NNODES=$WORLD NPROC_PER_NODE=8 {_SWIFT}"
    keys = [remark.key for remark in read_source(text).translate().approximated]
    assert sorted(keys) == ["env.NNODES", "env.PYTORCH_ALLOC_CONF"]


def test_devices_of_a_command_and_of_the_hardware_must_agree(command):
    job = "CUDA_VISIBLE_DEVICES=0 llamafactory-cli train lf.yaml"
    code, _, errors = command("estimate", job, "--hardware", "2xrtx_4090")
    assert code == 2 and "world_size=1 differ" in errors


def test_doctor_takes_commands_that_end_like_files(command, tmp_path):
    assert command("doctor", "uv run axolotl train ax.yml")[0] == 0
    (tmp_path / "other.yaml").write_text("services: {}")
    assert examine_foreign(str(tmp_path / "other.yaml")) is examine_foreign("a/model") is None


@pytest.mark.parametrize(
    ("variable", "hardware", "accumulation"),
    [("", None, 16), ("", "rtx_4090", 16), ("", "4xrtx_4090", 4), ("NPROC_PER_NODE=4 ", "rtx_4090", 4)],
)
def test_one_card_of_the_hardware_leaves_the_commands_devices(variable, hardware, accumulation):
    """ms-swift accumulates to 16 samples over all devices."""
    job = f"{variable}swift sft --model Qwen/Qwen2.5-0.5B --max_length 64"
    spec = read_job(job, "full", None, hardware=hardware)[0]
    assert spec.training["gradient_accumulation_steps"] == accumulation
    assert spec.world_size == (4 if variable else None)


_CHECKPOINTS = {"training.activation_checkpointing": False, _BATCH: 4}
_MEANT = "gradient_checkpointing false --per_device_train_batch_size 4"
_OPTIM = {"training.optim": "paged_adamw_8bit"}
_TUNE = "tune run full_finetune_single_device --config tune.yaml"

# Command or script, ours -> the text after the edit, None where the changes are printed as a list.
_EDITS = (
    ("llamafactory-cli train lf.yaml cutoff_len=8", {_BATCH: 4}, "… per_device_train_batch_size=4"),
    (
        "llamafactory-cli train lf.yaml per_device_train_batch_size=2 cutoff_len=8",
        {_BATCH: 4},
        "llamafactory-cli train lf.yaml per_device_train_batch_size=4 cutoff_len=8",
    ),
    (_TUNE, {_BATCH: 4}, "… batch_size=4"),
    (_TUNE, _OPTIM, "… optimizer._component_=bitsandbytes.optim.PagedAdamW8bit ~optimizer.fused"),
    (
        f"{_TUNE} optimizer=torch.optim.AdamW",
        _OPTIM,
        f"{_TUNE} optimizer=bitsandbytes.optim.PagedAdamW8bit ~optimizer.fused",
    ),
    ("axolotl train ax.yml", _CHECKPOINTS, "… --micro-batch-size 4"),
    (
        "axolotl train ax.yml --gradient-checkpointing true --launcher torchrun -- --nproc_per_node=2",
        _CHECKPOINTS,
        "axolotl train ax.yml --gradient-checkpointing false --launcher torchrun --micro-batch-size 4"
        " -- --nproc_per_node=2",
    ),
    ("axolotl train ax.yml", {"memory.loss_chunk_size": True}, None),
    (f"{_SWIFT} | tee log.txt", _CHECKPOINTS, f"{_SWIFT} --{_MEANT} | tee log.txt"),
    (f"{_SWIFT} > log 2>&1 &\nwait", _CHECKPOINTS, f"{_SWIFT} --{_MEANT} > log 2>&1 &\nwait"),
    (f"{_SWIFT} # mine\nswift export --x 1", _CHECKPOINTS, f"{_SWIFT} --{_MEANT} # mine\nswift export --x 1"),
    (
        f"{_SWIFT} \\\n    --packing true\n# end",
        {_BATCH: 4},
        f"{_SWIFT} \\\n    --packing true \\\n    --per_device_train_batch_size 4\n# end",
    ),
    (
        f"{_SWIFT} --gradient_checkpointing \\\n  --packing true",
        {"training.activation_checkpointing": False},
        f"{_SWIFT} --gradient_checkpointing false \\\n  --packing true",
    ),
    (
        f"trl sft {_MODEL} --gradient_checkpointing",
        {"training.activation_checkpointing": False},
        f"trl sft {_MODEL} --gradient_checkpointing false",
    ),
    (
        f"trl sft {_MODEL} --no_gradient_checkpointing",
        {"training.activation_checkpointing": True},
        f"trl sft {_MODEL} --gradient_checkpointing true",
    ),
    (f"A='--per_device_train_batch_size 2 --packing true'\n{_SWIFT} $A", {_BATCH: 4}, None),
    (f"B=2\n{_SWIFT} --per_device_train_batch_size $B", {_BATCH: 4}, f"B=2\n{_SWIFT} --per_device_train_batch_size 4"),
)


def test_an_edited_command_says_what_was_meant(subtests):
    for text, ours, expected in _EDITS:
        with subtests.test(text=text, ours=ours, expected=expected):
            source = read_command(None, text)
            keys = changes(source, chosen_keys(source.table, ours))
            edited = edit(source, keys)
            assert keys and edited == (expected.replace("…", text) if expected else None)
            if edited:
                fields = read_command(None, edited).translate().fields
                assert {key: fields.get(key) for key in ours} == ours


_AXOLOTL = "base_model: Qwen/Qwen3-0.6B\ndatasets: [{path: a}]\n"
_CCE = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
_CHUNKS = {"memory.loss_chunk_size": True}
_ADAM = "optimizer:\n  _component_: torch.optim.AdamW\n"
_TORCHTUNE = "model: {_component_: torchtune.models.qwen3.qwen3_0_6b_instruct}\n"
# File, ours -> the file after the edit, None where the changes are printed as a list.
_FILE_EDITS = (
    (
        f"{_AXOLOTL}plugins: [axolotl.integrations.liger.LigerPlugin]\n",
        _CHUNKS,
        ("LigerPlugin]", f"LigerPlugin, {_CCE}]"),
    ),
    (f"{_AXOLOTL}micro_batch_size: &mbs 2\n", {_BATCH: 4}, ("&mbs 2", "&mbs 4")),
    (f"{_AXOLOTL}micro_batch_size: &mbs 2\neval_batch_size: *mbs\n", {_BATCH: 4}, None),
    (f"{_AXOLOTL}eval_batch_size: &mbs 2\nmicro_batch_size: *mbs\n", {_BATCH: 4}, None),
    ("{base_model: Qwen/Qwen3-0.6B, datasets: []}\n", {_BATCH: 4}, None),
    (
        f"{_TORCHTUNE}{_ADAM}  fused: True  # fast\n  lr: 2e-5\n",
        _OPTIM,
        ("torch.optim.AdamW\n  fused: True  # fast", "bitsandbytes.optim.PagedAdamW8bit"),
    ),
    (
        f"{_TORCHTUNE}{_ADAM}  lr: 2e-5\n",
        {"training.optim": "adamw_torch_fused"},
        ("  _comp", "  fused: true\n  _comp"),
    ),
    (f"{_TORCHTUNE}optimizer: {{_component_: torch.optim.AdamW, fused: true}}\n", _OPTIM, None),
)


@pytest.mark.parametrize(("text", "ours", "expected"), _FILE_EDITS)
def test_an_edited_file_says_what_was_meant(text, ours, expected, tmp_path):
    source = read_settings(tmp_path / "job.yaml", text)
    keys = changes(source, chosen_keys(source.table, ours))
    assert keys and edit(source, keys) == (text.replace(*expected) if expected else None)


def test_changes_in_words():
    assert in_words({"a": True, "b": None, "c": "d"}) == 'set these: a: true, c: "d"; take out b'
    assert in_words({"b": None}) == "take out b" and in_words({}) == ""


_DEEPSPEED = """distributed_type: DEEPSPEED
num_processes: 2
deepspeed_config: {gradient_accumulation_steps: 16, zero_stage: 2}
"""
_JSON = {
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--gradient_accumulation_steps 16", ""),
        ("--gradient_accumulation_steps 4", "has 16 and TrainingArguments 4 for gradient_accumulation_steps"),
    ],
)
def test_the_launchers_accumulation_is_compared_with_the_trainers(words, refused, command, tmp_path):
    (tmp_path / "ds.yaml").write_text(_DEEPSPEED)
    job = f"accelerate launch --config_file ds.yaml sft.py --model_name_or_path {builtin_model()} --bf16 true {words}"
    code, _, errors = command("estimate", job, "--hardware", "rtx_4090", "--seq-len", "64")
    assert (code, refused in errors) == (2 if refused else 0, True)


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "refused"), [("1e-4", ""), ("3e-4", "params.lr=0.0001 vs hf learning_rate=0.0003")])
def test_a_learning_rate_is_compared_with_deepspeeds(rate, refused, command, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(_JSON))
    job = f"torchrun --nproc_per_node 2 sft.py --model_name_or_path {builtin_model()} --bf16 true --deepspeed ds.json"
    code, _, errors = command("estimate", f"{job} --learning_rate {rate}", "--hardware", "rtx_4090", "--seq-len", "64")
    assert (code, refused in errors) == (2 if refused else 0, True)


def test_a_key_beside_deepspeeds_file_is_refused():
    with pytest.raises(InputError, match="gradient_accumulation_steps=2 beside deepspeed_config_file"):
        read_source(
            "accelerate launch --use_deepspeed --deepspeed_config_file ds.json --gradient_accumulation_steps 2 "
            f"trl/scripts/sft.py {_MODEL}"
        )


def test_variables_of_a_shell_are_replaced_where_they_are_texts():
    variables = {"SIZE": "8b", "GPUS": ["0", "1"]}
    assert _value("qwen-$SIZE ${GPUS} $UNKNOWN ${MORE:-4}", variables) == "qwen-8b ${GPUS} $UNKNOWN 4"
