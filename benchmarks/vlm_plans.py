"""Plans of pictures beside settings made by hand: python benchmarks/vlm_plans.py

Five vision-language models on two cards, a picture of two sizes a sample, 32 samples a step. The settings made by hand
are what guides try: micro-batches with and without checkpointing, the loss in chunks, half of the layers. A row has
the fastest of those that fit a profile's share of the card, and the profile's own; nothing was measured.
"""

import itertools
import shlex

from record import record_each
from regress import answer

MODELS = ("qwen2.5-vl-7b", "qwen3-vl-4b", "qwen3-vl-8b", "gemma-3-12b", "smolvlm2-500m")
CARDS = {"rtx_4090": "qlora", "a100_80gb": "lora"}
SIZES = ("640x480", "1280x720")
SAMPLES = 32
OFF, ON = {"activation_checkpointing": "false"}, {"activation_checkpointing": "true"}
CHUNKS, HALF = {"loss_chunk_size": 1024}, {"checkpoint_ratio": 0.5}
HAND = [
    *({"per_device_train_batch_size": 1} | more for more in (OFF, ON, OFF | CHUNKS)),
    *({"per_device_train_batch_size": 2} | more for more in (OFF, ON, OFF | CHUNKS, HALF | CHUNKS)),
    *({"per_device_train_batch_size": 4} | more for more in (OFF | CHUNKS, ON | CHUNKS, HALF)),
    *({"per_device_train_batch_size": 8} | more for more in (OFF | CHUNKS, ON | CHUNKS, ON)),
    {"per_device_train_batch_size": 16} | ON | CHUNKS,
]


def words_of(settings: dict) -> list[str]:
    return list(itertools.chain.from_iterable(("--set", f"{name}={value}") for name, value in settings.items()))


def job_of(model: str, card: str, size: str) -> tuple[str, ...]:
    return (model, "--hardware", card, "--method", CARDS[card], *words_of({"images": 1, "image_size": size}))


def planned(plan: dict) -> dict:
    """Profile -> its settings and figures."""
    return {
        profile["profile"]: {
            "settings": profile["settings"],
            "tokens_per_second": profile["tokens_per_second"],
            "device_bytes": profile["estimate"]["device_bytes"],
        }
        for profile in plan["profiles"]
    }


def plan_of(job: tuple[str, ...]) -> dict:
    return answer(shlex.join(["plan", *job, "--effective-batch-size", str(SAMPLES)]))["answer"]


def compared(model: str, card: str, size: str) -> dict:
    """A row: a picture's size, a model and a card."""
    job = job_of(model, card, size)
    plan, hand = plan_of(job), []
    for settings in HAND:
        own = settings | {"gradient_accumulation_steps": SAMPLES // settings["per_device_train_batch_size"]}
        if found := answer(shlex.join(["estimate", *job, *words_of(own)])).get("answer"):  # none of a refusal
            hand.append((found["tokens_per_second"], found["device_bytes"], settings))
    by_hand = {}
    for profile in plan["profiles"]:
        room = profile["target_utilization"] * plan["usable_bytes"]
        speed, _, settings = max((made for made in hand if made[1] <= room), key=lambda made: made[0])
        faster = round(speed / profile["tokens_per_second"] - 1, 4)
        by_hand[profile["profile"]] = {"settings": settings, "tokens_per_second": round(speed, 1), "faster": faster}
    row = {"model": model, "card": card, "size": size, "tried": len(hand)}
    return row | {"planned": planned(plan), "by_hand": by_hand}


def again(row: dict) -> dict:
    """What is planned now."""
    return {"planned": planned(plan_of(job_of(row["model"], row["card"], row["size"])))}


if __name__ == "__main__":
    record_each("vlm_plans", compared, itertools.product(MODELS, CARDS, SIZES))
