"""What people type from memory is understood, or answered with what they meant."""

import shlex
import tomllib
from pathlib import Path

import pytest

from hf_memopt.cli import main
from hf_memopt.errors import InputError
from hf_memopt.estimator.architectures import hub_id, list_architectures, load_config
from hf_memopt.job.spec import JobSpec
from hf_memopt.planner.devices import with_device_count

MISTAKES = tomllib.loads((Path(__file__).parents[1] / "natural_mistakes.toml").read_text(encoding="utf-8"))


class Understood(BaseException):
    """Ends a command where its words have been judged; carries the job."""


@pytest.fixture
def understood(monkeypatch):
    """The job that a command line stands for, without the libraries that would predict it."""

    from hf_memopt.cli import words

    check_words = words.check_words

    def judged(spec, *methods):
        raise Understood(check_words(spec, *methods))

    monkeypatch.setattr("hf_memopt.cli.estimate.check_words", judged)
    monkeypatch.setattr("hf_memopt.cli.words.check_words", judged)

    def call(*argv: str) -> JobSpec:
        monkeypatch.setattr("sys.argv", ["hf-memopt", *argv])
        with pytest.raises(Understood) as ended:
            main()
        return ended.value.args[0]

    return call


@pytest.mark.kept
@pytest.mark.slow
def test_natural_mistake(command, recipe, understood, tmp_path, monkeypatch, subtests):
    mistakes = [mistake for lines in MISTAKES.values() for mistake in lines.items()]
    for number, (line, answer) in enumerate(mistakes):
        with subtests.test(line=line):
            folder = tmp_path / str(number)
            folder.mkdir()
            monkeypatch.chdir(folder)
            words = shlex.split(line)
            if words[0].endswith(".py"):
                with pytest.raises(InputError) as refused:
                    recipe(words[0].removesuffix(".py"))(words[1:])
                assert answer in str(refused.value)
            elif isinstance(answer, str):
                code, _, err = command(*words)
                assert code == 2 and answer in err.splitlines()[-1]
                assert not list(folder.iterdir())
            elif "understood" in answer:
                code, out, err = command(*words)
                assert code == 0 and answer["understood"] in out + err
            else:
                spec = understood(*words)
                card, devices = with_device_count(spec.hardware or spec.preset, spec.world_size)
                job = {"card": card, "devices": devices, **vars(spec)}
                assert {name: job[name] for name in answer} == answer


def test_so_many_words():
    assert sum(map(len, MISTAKES.values())) >= 150


def test_instruct_models_are_known(subtests):
    for name, identifier, positions in [
        ("llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct", 131072),
        ("Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct", 131072),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct", 131072),
        ("qwen2.5-7b-instruct", "Qwen/Qwen2.5-7B-Instruct", 32768),
        ("llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-chat-hf", 4096),
        ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", 131072),
        ("qwen3-8b", "Qwen/Qwen3-8B", 40960),
        ("Llama 3.1 8B Instruct", "meta-llama/Llama-3.1-8B-Instruct", 131072),
        ("QWEN 3_8b", "Qwen/Qwen3-8B", 40960),
    ]:
        with subtests.test(name=name):
            assert hub_id(name) == identifier and load_config(name).max_position_embeddings == positions


def test_every_bundled_name_stands_for_its_own_file():
    for name in list_architectures():
        assert load_config(name).to_dict() == load_config(hub_id(name)).to_dict()


@pytest.mark.parametrize("name", ["sft", "video_sft", "dpo", "grpo", "pretrain"])
def test_no_argument_of_a_recipe_is_another_tools_word(name, recipe, monkeypatch):
    """export refuses those words without asking the recipe's parser; and what is judged before it is what it knows."""
    from hf_memopt.other_names import meant_by
    from hf_memopt.recipe import argument_check, recipe_arguments

    actions, known = {}, {}
    parser = recipe_arguments._parser
    monkeypatch.setattr(recipe_arguments, "_parser", lambda *given: actions.setdefault("parser", parser(*given)))
    monkeypatch.setattr(
        argument_check, "check_words", lambda own, kind, argv: known.update(argument_check.known_arguments(own, kind))
    )
    with pytest.raises(InputError):
        recipe(name)(["--no_such_argument", "1"])
    names = {action.dest for action in actions["parser"]._actions}
    assert len(names) > 100 and names == known.keys() - {"rung"}
    assert not [field for field in names if meant_by("argument", field, names) not in (None, field)]


def test_a_recipe_without_arguments_has_nothing_to_judge():
    from hf_memopt.recipe.argument_check import check_words

    check_words("VideoArguments", "TrainingArguments", [])
    check_words("RecipeArguments", "TrainingArguments", ["--bf16", "--no_save_only_model"])
    check_words("RecipeArguments", "TrainingArguments", ["--lora.r", "8", "--quantization.load_in_4bit=true"])
    for word, message in (("--lora.rr=8", "lora 'rr'"), ("--loro.r=8", "'loro.r'"), ("--no_lora", "'no_lora'")):
        with pytest.raises(InputError, match=message):
            check_words("RecipeArguments", "TrainingArguments", [word])


def test_fields_are_read_from_the_source_as_the_libraries_have_them():
    import dataclasses

    import peft
    import transformers
    import trl

    from hf_memopt.stack.declared import declared_hints, declared_parameters, declared_values

    kinds = [transformers.TrainingArguments, peft.LoraConfig]
    kinds += [getattr(trl, f"{name}Config") for name in ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO")]
    for kind in kinds:
        assert declared_hints(kind.__name__).keys() == {item.name for item in dataclasses.fields(kind) if item.init}
    assert "bnb_4bit_quant_type" in declared_parameters("BitsAndBytesConfig")
    optimizers = transformers.training_args.OptimizerNames
    assert declared_values("OptimizerNames") == [member.value for member in optimizers]
    assert declared_hints("TrainingArguments")["max_steps"] is int
