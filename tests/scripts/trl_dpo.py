"""DPO with TRL's parser, as trl/scripts/dpo.py.

python trl_dpo.py --model_name_or_path models/mistral --dataset_name json --data_files data/preferences.json
    --per_device_train_batch_size 4 --dtype float32 --bf16 False --report_to none --output_dir out
"""

from dataclasses import dataclass

from datasets import load_dataset
from trl import (
    DPOConfig,
    DPOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)


@dataclass
class FileArguments(ScriptArguments):
    data_files: str | None = None


def main(script_args, training_args, model_args):
    training_args.model_init_kwargs = dict(
        revision=model_args.model_revision,
        attn_implementation=model_args.attn_implementation,
        dtype=model_args.dtype,
    )
    dataset = load_dataset(script_args.dataset_name, data_files=script_args.data_files)
    trainer = DPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)


if __name__ == "__main__":
    parser = TrlParser((FileArguments, DPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    main(script_args, training_args, model_args)
