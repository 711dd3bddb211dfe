"""Tasks that models train for: the class that transformers builds for each, and the tensors of a batch."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_memopt.errors import InputError, choose, respell
from hf_memopt.estimator.private_names import Part
from hf_memopt.estimator.trl_tasks import TRL_TASKS

_USED = Part.EVERY_JOB.relies_on(
    "transformers.models.auto.auto_factory:_BaseAutoModelClass._model_mapping",
    why="says which tasks a configuration has a model for",
    until="transformers has a public name for it",
)
Shapes = dict[str, tuple[tuple[int, ...], Any]]  # name -> (shape, dtype)


@dataclass(frozen=True)
class Batch:
    """A micro-batch's sizes, which decide its tensors.

    Attributes:
        config: the model's.
        samples: of a micro-batch.
        tokens: per sample.
    """

    config: Any
    samples: int
    tokens: int


def _image_size(config) -> tuple[int, int]:
    """Height and width of the images that a model takes; 224, which most image processors scale to, where any do."""
    vision = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
    size = getattr(vision, "image_size", None) or getattr(vision, "crop_size", None) or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return height, width


def _channels(config) -> int:
    vision = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
    return getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3


def _per_sample(batch: Batch) -> dict[str, tuple[int, ...]]:
    return {"labels": (batch.samples,)}


def _per_token(batch: Batch) -> dict[str, tuple[int, ...]]:
    return {"labels": (batch.samples, batch.tokens)}


def _fewer_than_frames(batch: Batch) -> dict[str, tuple[int, ...]]:
    """Labels of CTC: English speech has some 15 letters a second, wav2vec 2.0's encoder 50 frames."""
    return {"labels": (batch.samples, max(1, batch.tokens * 3 // 10))}


@dataclass(frozen=True)
class Task:
    """A task that a Trainer trains a model for.

    Attributes:
        auto_class: of transformers.
        labels: the shapes of int64 labels for a Batch.
        choices: texts per sample.
        pipelines: Hugging Face's other names of the task, those of its pipelines.
        adapters: peft's task type, by which it also trains the head of a classifier; None where it has none.
    """

    auto_class: str
    labels: Callable[[Batch], dict[str, tuple[int, ...]]] = _per_token
    choices: int = 1
    pipelines: tuple[str, ...] = ()
    adapters: str | None = None

    def model_class(self, config) -> type | None:
        """The class of the model for a configuration; None where transformers has none."""
        import transformers

        auto = getattr(transformers, self.auto_class, None)  # older versions lack some
        mapping = auto._model_mapping if auto else {}
        if type(config) not in mapping:
            return None
        try:
            classes = mapping[type(config)]
        except ValueError:  # the table names a class that its version lacks
            return None
        if not isinstance(classes, tuple | list):
            return classes
        named = [kind for kind in classes if kind.__name__ in (config.architectures or ())]
        return (named or classes)[0]


@dataclass(frozen=True)
class _Embeddings(Task):
    """Pairs of texts for a model of text without a head (pair_loss.py)."""

    def model_class(self, config) -> type | None:
        kind = super().model_class(config)
        # Static: the class of a model whose libraries are missing raises when it is asked for anything.
        text = not config.is_encoder_decoder and inspect.getattr_static(kind, "main_input_name", None) == "input_ids"
        return kind if text and "input_ids" in inspect.signature(kind.forward).parameters else None


EMBEDDINGS = "feature-extraction"  # Hugging Face's name of embedding models
_CHOICES = 4  # answers per question, as in SWAG, the data set of transformers' own example
TASKS = {
    "image-text-to-text": Task("AutoModelForImageTextToText", adapters="CAUSAL_LM"),
    "causal-lm": Task("AutoModelForCausalLM", pipelines=("text-generation",), adapters="CAUSAL_LM"),
    "seq2seq-lm": Task(
        "AutoModelForSeq2SeqLM",
        pipelines=("text2text-generation", "summarization", "translation", "seq2seq"),
        adapters="SEQ_2_SEQ_LM",
    ),
    "masked-lm": Task("AutoModelForMaskedLM", pipelines=("fill-mask",)),
    "sequence-classification": Task(
        "AutoModelForSequenceClassification",
        _per_sample,
        pipelines=("text-classification", "sentiment-analysis"),
        adapters="SEQ_CLS",
    ),
    "token-classification": Task("AutoModelForTokenClassification", pipelines=("ner",), adapters="TOKEN_CLS"),
    "question-answering": Task(
        "AutoModelForQuestionAnswering",
        lambda batch: {"start_positions": (batch.samples,), "end_positions": (batch.samples,)},
        adapters="QUESTION_ANS",
    ),
    "multiple-choice": Task("AutoModelForMultipleChoice", _per_sample, choices=_CHOICES),
    "next-sentence-prediction": Task("AutoModelForNextSentencePrediction", _per_sample),
    "image-classification": Task("AutoModelForImageClassification", _per_sample),
    "video-classification": Task("AutoModelForVideoClassification", _per_sample),
    "semantic-segmentation": Task(
        "AutoModelForSemanticSegmentation",
        lambda batch: {"labels": (batch.samples, *_image_size(batch.config))},
        pipelines=("image-segmentation",),
    ),
    "speech-seq2seq": Task("AutoModelForSpeechSeq2Seq", pipelines=("automatic-speech-recognition",)),
    "ctc": Task("AutoModelForCTC", _fewer_than_frames, pipelines=("automatic-speech-recognition",)),
    "audio-classification": Task("AutoModelForAudioClassification", _per_sample),
    "multimodal-lm": Task("AutoModelForMultimodalLM", pipelines=("any-to-any",), adapters="CAUSAL_LM"),
    EMBEDDINGS: _Embeddings(
        "AutoModel",
        lambda batch: {},
        choices=2,
        pipelines=("sentence-similarity",),
        adapters="FEATURE_EXTRACTION",
    ),
}


def named_tasks(name: str) -> list[str]:
    """The tasks of TASKS that a name stands for.

    Raises:
        InputError: an unknown name.
    """
    rows = {task: [task, row.auto_class, *row.pipelines] for task, row in TASKS.items()}
    if named := [task for task, known in rows.items() if respell("task", name, known) in known]:
        return named
    raise choose("task", name, [*TASKS, *TRL_TASKS])


def find_task(name: str, config, asked: str = "") -> str:
    """The task of TASKS that a name stands for: its own, a pipeline's, or an auto class's.

    Args:
        asked: the task that trains such a model, where a user named that one (dpo).

    Raises:
        InputError: an unknown name, or a model type that has no model for the task.
    """
    named = named_tasks(name)
    for task in named:
        if TASKS[task].model_class(config) is not None:
            return task
    known = ", ".join(task for task, row in TASKS.items() if row.model_class(config) is not None)
    raise InputError(
        f"task={asked or name}: transformers has no {TASKS[named[0]].auto_class} of model type {config.model_type!r}; "
        + (f"its tasks: {known}" if known else "it has none that a Trainer trains")
    )


def infer_task(config) -> str:
    """The task of a configuration's model: the checkpoint's own, else the usual one of its model type.

    Raises:
        InputError: the model type has no head that a Trainer could train.
    """
    classes = {task: row.model_class(config) for task, row in TASKS.items()}
    for name in config.architectures or ():
        for task, kind in classes.items():
            if kind is not None and kind.__name__ == name:
                return task
    usual = [task for task in TASKS if task != EMBEDDINGS]
    if config.is_encoder_decoder:
        usual = ["seq2seq-lm", "speech-seq2seq", *usual]
    elif classes["image-text-to-text"] is not None:
        usual = ["image-text-to-text"]
    elif not getattr(config, "is_decoder", False):
        usual = ["masked-lm", *usual]
    for task in usual:
        if classes[task] is not None:
            return task
    raise InputError(
        f"model type {config.model_type!r} has no head that a Trainer could train; tasks: {', '.join(TASKS)}"
    )


def with_token_ids(config):
    """A copy of a configuration with the token ids that losses ask for, where it has none.

    Scripts set them from the tokenizer: the padding of a sequence classifier, the first token of a decoder. They have
    no effect on memory.
    """
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        for name in ("pad_token_id", "decoder_start_token_id", "eos_token_id"):
            if getattr(part, name, None) is None and (name == "pad_token_id" or config.is_encoder_decoder):
                setattr(part, name, 0)
    return config


def batch_shapes(task: str, config, micro_batch: int, seq_len: int, padded: bool, packed: bool = False) -> Shapes:
    """The tensors of one micro-batch: name -> (shape, dtype). Token ids are int64, as collators make them."""
    import torch

    row, batch = TASKS[task], Batch(config, micro_batch, seq_len)
    kind = row.model_class(config)
    takes = inspect.signature(kind.forward).parameters if kind is not None else {}
    labels = row.labels(batch)
    if labels and kind is not None and not takes.keys() & (labels.keys() | {"kwargs"}):
        raise InputError(f"{kind.__name__} takes no labels: it has no loss that a Trainer could train it with")
    main = getattr(kind, "main_input_name", "input_ids")
    if main in _UNKNOWN_INPUTS and (main == "state" or "input_ids" not in takes):
        raise InputError(
            f"{kind.__name__} takes {main}: {_UNKNOWN_INPUTS[main]}, which estimate() does not make; "
            "estimate_trainer() and dry-run take the batches of your own data"
        )
    shapes = {main: (_OTHER_INPUTS[main](batch), torch.float32)} if main in _OTHER_INPUTS else {}
    if main not in _OTHER_INPUTS or (task == "image-text-to-text" and "input_ids" in takes):
        tokens = (micro_batch, *((row.choices,) if row.choices > 1 else ()), seq_len)
        present = {"input_ids": True, "attention_mask": padded, "position_ids": packed}
        shapes |= {name: (tokens, torch.int64) for name, is_present in present.items() if is_present}
        if "bbox" in takes:  # of each token on its page, from the processor
            shapes["bbox"] = ((*tokens, 4), torch.float32 if config.model_type == "udop" else torch.int64)
    return shapes | {name: (shape, torch.int64) for name, shape in labels.items()}


def _pixels(batch: Batch) -> tuple[int, ...]:
    frames = getattr(batch.config, "num_frames", None)
    return (batch.samples, *((frames,) if frames else ()), _channels(batch.config), *_image_size(batch.config))


def _video(batch: Batch) -> tuple[int, ...]:
    config = batch.config
    frames = getattr(config, "frames_per_clip", None) or getattr(config, "num_frames", 16)
    return (batch.samples, frames, _channels(config), *_image_size(config))


def _patches(batch: Batch) -> tuple[int, ...]:
    """Pix2Struct's: row, column and pixels of each patch; 2,048 of them (max_patches of its image processor)."""
    return (batch.samples, 2048, batch.config.vision_config.patch_embed_hidden_size + 2)


def _waveform(batch: Batch) -> tuple[int, ...]:
    """Audio from which the convolutions make as many frames as there are tokens, or a spectrogram of fixed length."""
    config = batch.config
    if getattr(config, "max_length", None) and getattr(config, "num_mel_bins", None):  # Audio Spectrogram Transformer
        return (batch.samples, config.max_length, config.num_mel_bins)
    kernels = getattr(config, "conv_kernel", None)
    if kernels is None:
        return (batch.samples, _SECONDS * 16_000)
    length = batch.tokens
    for kernel, stride in zip(reversed(kernels), reversed(config.conv_stride), strict=True):
        length = (length - 1) * stride + kernel
    return (batch.samples, length)


def _features(batch: Batch) -> tuple[int, ...]:
    """A spectrogram: of 30 seconds for models with a decoder, else one frame for each of the tokens."""
    config = batch.config
    inner = getattr(config, "encoder_config", None) or getattr(config, "audio_config", None) or config
    names = ("feature_projection_input_dim", "num_mel_bins", "input_feat_per_channel", "input_dim", "mel_dim")
    width = next((value for name in names if (value := getattr(inner, name, None))), None)
    if width is None:
        raise InputError(f"model type {config.model_type!r}: its configuration does not say how wide a spectrogram is")
    if config.model_type == "whisper":
        return (batch.samples, width, 2 * config.max_source_positions)
    frames = min(_SECONDS * 100, getattr(config, "max_source_positions", _SECONDS * 100))
    if not config.is_encoder_decoder:
        frames = batch.tokens * (getattr(inner, "subsampling_factor", None) or 1)
    return (batch.samples, frames, width)


_SECONDS = 30  # of speech for models with a decoder: the length of Whisper's windows
_UNKNOWN_INPUTS = {"state": "a robot's joints", "inputs": "those of its parts"}
_OTHER_INPUTS = {
    "pixel_values": _pixels,
    "pixel_values_videos": _video,
    "flattened_patches": _patches,
    "input_values": _waveform,
    "input_features": _features,
}
