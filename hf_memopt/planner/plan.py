"""plan(): the fastest settings that fit, for four profiles from safe to maximum."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_type_hints

from hf_memopt.errors import InputError, MethodRefused, brief, choose, one_line
from hf_memopt.estimator.spec_job import read_model
from hf_memopt.field_values import check_value
from hf_memopt.hardware.host_memory import HostMemory
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers.arguments import PLAN_PROFILES, THRESHOLDS, MemoryArguments
from hf_memopt.planner.alternatives import Alternative, Rejected, left_out, method_alternative, plain_alternative
from hf_memopt.planner.choice_jobs import start_search
from hf_memopt.planner.choices import Choice, memory_arguments, sharing_counts
from hf_memopt.planner.nothing_fits.fallbacks import Fallback, fallbacks
from hf_memopt.planner.nothing_fits.nearest import nearest_changes
from hf_memopt.planner.profiles import Plan, Profile
from hf_memopt.planner.proposals import Proposal, set_words
from hf_memopt.planner.search import Search, summarize
from hf_memopt.planner.settle import left_open, of_one_length, settle
from hf_memopt.planner.streamed_weights import (
    excessive_weights,
    lacks_memory,
    streaming_spec,
    what_lacks,
    with_host_memory,
)
from hf_memopt.planner.trl_choices import trl_space
from hf_memopt.presets import METHOD_TITLES, METHODS, Preset
from hf_memopt.presets.quantization_fields import check_4bit, check_quantization
from hf_memopt.units import GIB, gib


def plan(
    model,
    hardware: str | Preset = "auto",
    effective_batch_size: int | None = None,
    seq_len: int | None = None,
    method: str = "any",
    strategy: str | None = None,
    memory: int | None = None,
    training: dict | None = None,
    lora: dict | None = None,
    memory_args: MemoryArguments | None = None,
    quantization: dict | None = None,
    host_memory: int | None = None,
    quick: bool = False,
    say: Callable[[str], None] = lambda text: None,
    **more,
) -> Plan:
    """The fastest settings that are predicted to fit four shares of the device's memory.

    Args:
        model: a bundled architecture's name, hub id, folder, config.json or PretrainedConfig.
        hardware: a preset's name, with a number of devices for several: rtx_4090, rtx_4090x2, h100_80gbx128; or a
            Preset of the method.
        effective_batch_size: samples per optimizer step over all devices; by default the preset's.
        seq_len: tokens per sample; by default the preset's, of several methods' the longest, within the model's
            positions.
        method: full, lora or qlora; any takes the first of them that fits without host memory, else the first whose
            safest profile does, else the first that fits, and sketches the others that fit.
        strategy: how several devices train together; by default the fastest that fits.
        memory: bytes of each device that may be used; by default all of it.
        training, lora: TrainingArguments and LoraConfig fields that the plan keeps.
        memory_args: MemoryArguments that the plan keeps.
        quantization: BitsAndBytesConfig fields of QLoRA that the plan keeps.
        host_memory: bytes of host memory that one process may use; by default what is free on this machine
            (hardware="auto"), or what a small box with the device has.
        quick: answer by sketches, from a few traces and without an estimate of what is chosen. Engines that shard a
            model, streamed weights, and what would fit where nothing does, only estimates tell.
        say: called with a line for each thing that takes time.
        more: further fields of JobSpec: video, frozen, task, attn_implementation, dtype, padded, packed. With task
            dpo, kto, reward, grpo, rloo or sft the job is that of TRL's trainer, and `training` has the fields of its
            configuration.

    Raises:
        InputError: unknown names, or a batch that the devices cannot share.
    """
    _check_types(locals())
    host = None if host_memory is None else HostMemory(host_memory, "--host-memory", assumed=False)
    return plan_job(
        JobSpec(
            model=model,
            hardware=hardware,
            effective_batch_size=effective_batch_size,
            seq_len=seq_len,
            method=method,
            strategy=strategy,
            memory=memory,
            training=training or {},
            lora=lora or {},
            memory_args=memory_args or MemoryArguments(),
            quantization=quantization or {},
            host_memory=host,
            quick=quick,
            **more,
        ),
        say,
    )


def plan_job(spec: JobSpec, say: Callable[[str], None] = lambda text: None) -> Plan:
    """plan() of a job.

    Raises:
        InputError: as plan() raises it.
    """
    check_asked(spec)
    spec = read_model(spec)
    methods = (spec.method,)
    if spec.method == "any":  # a Preset is of one method
        methods = (spec.hardware.method,) if isinstance(spec.hardware, Preset) else METHODS
    opened = left_open(spec)
    plan = _answer(spec, methods, say, last=spec.quick or opened == spec)
    if not plan.profiles and not spec.quick and opened != spec:
        say("nothing fits with the settings that are given: leaving them open")
        plan = plan_job(opened, say)
        proposals = [
            replace(proposal, changes=[*_given_up(spec, proposal), *proposal.changes]) if proposal.choice else proposal
            for proposal in plan.fitting
        ]
        plan = replace(plan, proposals=proposals)
    return plan


def _given_up(spec: JobSpec, proposal: Proposal) -> list[str]:
    """The settings of a spec that a proposal has otherwise."""
    preset = proposal.choice.configured(proposal.spec.preset)
    fields = {**preset.training, **proposal.choice.fields(preset, proposal.spec.training)}
    if proposal.spec.method != spec.method:  # whose optimizer is its own
        fields["optim"] = spec.training.get("optim")
    return set_words({name: fields.get(name) for name, value in spec.training.items() if fields.get(name) != value})


def check_asked(spec: JobSpec) -> None:
    """Refuse what no plan takes.

    Raises:
        InputError: an unknown method, or a setting that a plan chooses or another method has.
    """
    if spec.method not in (*METHODS, "any"):
        raise choose("method", spec.method, [*METHODS, "any"])
    if spec.sizes:
        raise InputError(f"model.{next(iter(spec.sizes))} is for estimate and advise: give plan a config.json")
    if spec.lora and spec.method == "full":
        raise InputError("lora.* applies to method=lora only, and to its 4-bit form qlora")
    if spec.quantization and spec.method not in ("qlora", "any"):
        raise InputError("quantization.* applies to method=qlora only")
    check_4bit(check_quantization(spec.quantization))
    for name in ("deepspeed", "fsdp", "fsdp_config"):
        if value := spec.training.get(name):
            raise InputError(
                f"{name}={brief(value)}: plan chooses the engine's settings: name the engine with strategy, or ask "
                "`hf-memopt estimate` about this one"
            )


def _check_types(arguments: dict[str, Any]) -> None:
    """Compare plan()'s arguments with its annotations."""
    for name, hint in get_type_hints(plan).items():
        if name in arguments:
            check_value(name, hint, arguments[name])


def _answer(request: JobSpec, methods: tuple[str, ...], say: Callable[[str], None], last: bool) -> Plan:
    """The plan of the first method that fits without host memory, else of the first whose safest profile does, else of
    the first that fits, or what is missing.

    Args:
        last: where nothing fits, no other plan is tried instead, and changes are looked for.
    """
    request = of_one_length(request, methods)
    rejected: list[Rejected] = []
    searches: dict[str, tuple[JobSpec, Search | None]] = {}
    plans: list[Plan] = []
    refused: list[MethodRefused] = []
    for method in methods:
        try:
            spec = settle(request, method)
            reason = _far_too_large(spec)
            search = None if reason else start_search(spec, _numbered(say, method, methods))
        except MethodRefused as error:
            refused.append(error)
            rejected.append(Rejected(METHOD_TITLES[method], one_line(error)))
            continue
        searches[method] = spec, search
        if profiles := _profiles(spec, search):
            plans.append(Plan(spec, profiles, []))
            if not plans[-1].usual.choice.offloads:
                break
        else:
            rejected.append(reason or _too_large(spec, search, search and search.smallest()))
    if not searches:
        raise refused[0]
    if not plans:
        tried: list[tuple[Fallback, int]] = []
        if instead := _fallback(request, searches, rejected, tried, say):
            return instead
        nearest: list[Proposal] = []
        changed = ((fallback.change, [(fallback.named, fallback.spec)]) for fallback, _ in tried)
        settled = [("", spec) for spec, _ in searches.values()]
        for change, those in () if request.quick else ((None, settled), *changed):
            if streamed := _streamed(those, rejected, nearest, say):
                return replace(streamed, precision=change)
        method = [*searches][-1]
        plan = _nothing_fits(*searches[method], rejected, nearest, _numbered(say, method, methods), last)
        lacking = (plan.missing_bytes or 0, *(missing for _, missing in tried))
        least = min((missing for missing in lacking if missing > 0), default=None)
        return replace(plan, missing_bytes=least)
    # Of methods whose usual profiles use host memory, one that has a safe profile without it.
    best = min(plans, key=lambda made: (bool(made.usual.choice.offloads), bool(made.profiles[0].choice.offloads)))
    spec, search = searches[best.spec.preset.method]
    result = _make_plan(spec, search, best.profiles, rejected)
    alternatives = _methods(request, methods, searches, result.usual, say) if len(methods) > 1 else []
    adapted = None if spec.lora == request.lora else "adapters are those of attention: none can train experts in FP8"
    plain = plain_alternative(search, result.usual, spec.memory)
    return replace(result, plain=plain, methods=alternatives, precision=adapted)


def _fallback(request: JobSpec, searches: dict, rejected: list[Rejected], tried: list, say) -> Plan | None:
    """The plan of the first fallback that fits; None where none does.

    Args:
        rejected, tried: get those that do not; the latter with the bytes that each lacks.
    """
    for fallback in fallbacks(request, {method: spec for method, (spec, _) in searches.items()}):
        say(fallback.trying)
        alone = excessive_weights(fallback.spec)
        try:
            search = None if alone else start_search(fallback.spec, say)
        except InputError:  # what the model or another setting does not go with
            continue
        if profiles := _profiles(fallback.spec, search):
            rejected = [replace(reason, settings=f"{reason.settings}{fallback.without}") for reason in rejected]
            return replace(_make_plan(fallback.spec, search, profiles, rejected), precision=fallback.change)
        smallest = search and search.smallest()
        if fallback.spec.preset.method == "qlora" and (alone or smallest):
            reason = _far_too_large(fallback.spec) or _too_large(fallback.spec, search, smallest)
            needs = reason.reason.removeprefix(f"{reason.settings} ")
            rejected.append(Rejected(f"{reason.settings}{fallback.named}", needs))
            tried.append((fallback, int(alone[0] if alone else search.needs(smallest)) - fallback.spec.memory_budget))
    return None


def _make_plan(spec: JobSpec, search: Search, profiles: list[Profile], rejected: list[Rejected]) -> Plan:
    """A plan with profiles, and why it has no others."""
    result = Plan(spec, profiles, [*rejected, *_safe_left_out(profiles)])
    result.rejected.extend(left_out(search, spec.memory_budget, [profile.choice for profile in profiles]))
    if spec.task == "sft" and sharing_counts(replace(spec, task=None)):
        result.rejected.append(Rejected("samples shared by devices", "predicted without --task sft alone"))
    if spec.tool is None and (space := trl_space(spec)) is not None:
        result.rejected.extend(Rejected(field, reason) for field, reason in space.left_out())
    return replace(result, link=search.cost.link_bound(result.usual.choice))


def _streamed(
    settled: list[tuple[str, JobSpec]], rejected: list[Rejected], nearest: list[Proposal], say
) -> Plan | None:
    """The plan of the first method that fits with frozen weights in host memory; None where none does.

    Args:
        settled: of each method or fallback, with what the latter has in words that follow a method's.
        rejected, nearest: get why a method does not fit so either, and the host memory with which it would.
    """
    resident = [replace(reason, settings=f"{reason.settings}, all weights on the device") for reason in rejected]
    tried = []
    for named, spec in settled:
        takes = spec.tool is None or "memory.weight_streaming" in spec.tool.features
        if takes and (streaming := streaming_spec(spec)):
            what = f"{METHOD_TITLES[spec.preset.method]}{named}, weights streamed"
            tried.append((what, streaming, lacks_memory(streaming)))
    resident += [Rejected(what, reason) for what, _, reason in tried if reason]
    for what, spec, reason in sorted(tried, key=lambda row: bool(row[-1])):  # what lacks memory only to say how much
        if reason and nearest:
            rejected.append(Rejected(what, reason))
            continue
        try:
            search = start_search(spec, say)
        except InputError:  # weights that cannot be streamed
            continue
        if search is None:
            continue
        if profiles := _profiles(spec, search):
            return _make_plan(spec, search, profiles, resident)
        lacking = Rejected(what, what_lacks(search, spec.memory_budget))
        rejected.append(lacking)
        resident.append(lacking)
        nearest += filter(None, [with_host_memory(spec, search)])
    return None


def _numbered(say: Callable[[str], None], method: str, methods: tuple[str, ...]) -> Callable[[str], None]:
    """say() that says which of several methods it is about."""
    if len(methods) == 1:
        return say
    return lambda text: say(f"method {methods.index(method) + 1} of {len(methods)}: {text}")


def _nothing_fits(
    spec: JobSpec, search: Search | None, rejected: list[Rejected], nearest: list[Proposal], say, last: bool
) -> Plan:
    """The plan of a job that does not fit: what is missing.

    Args:
        search: None where there are no choices, or where the weights alone ruled them out.
        nearest: changes that are known to make the job fit.
    """
    certain = search is None and _far_too_large(spec)  # which no estimate would change
    search = start_search(spec, say, smallest=True) if certain else search
    one = search and search.choices and search.choices[0].strategy
    smallest = search and (search.one_sample(one) if certain else search.smallest())
    if smallest is None:
        return Plan(spec, [], rejected)
    estimate, budget = search.estimates.get(smallest), spec.memory_budget
    if estimate and search.needs(smallest) <= budget:
        change = f"--host-memory {-(-estimate.host_bytes // GIB)}"
        host = Proposal([change], int(search.needs(smallest)), estimate.host_bytes, spec, smallest)
        return Plan(spec, [], rejected, estimate.host_bytes - spec.host_memory.bytes, [host])
    if last and not spec.quick:
        nearest = [*nearest, *nearest_changes(spec, search, smallest, say)]
    return Plan(spec, [], rejected, int(search.needs(smallest)) - budget, nearest)


def _safe_left_out(profiles: list[Profile]) -> list[Rejected]:
    """The reason that there is no safe profile, or that it depends on the host."""
    if profiles[0].name != "safe":
        share, discrete = PLAN_PROFILES["safe"][1], profiles[0].preset.hardware.discrete_memory
        without = " without host memory, which a safe profile does not need" if discrete else ""
        return [Rejected("safe", f"nothing fits {share:.0%}{without}")]
    if profiles[0].choice.offloads:
        return [Rejected("safe without host memory", "nothing fits: every profile depends on host memory")]
    return []


def _methods(request: JobSpec, methods, searches, profile: Profile, say) -> list[Alternative]:
    """Every method that fits the memory of a profile, with its settings; by sketches but for the profile's own."""
    alternatives = []
    for method in methods:
        if method not in searches and request.quick:
            continue  # a trace more
        if method not in searches:
            try:
                spec = settle(request, method)
                searches[method] = spec, start_search(spec, _numbered(say, method, methods))
            except InputError:  # the plan stands without it, as without 4 bits where there are no kernels for them
                continue
        if alternative := method_alternative(*searches[method], profile):
            alternatives.append(alternative)
    return alternatives


def _profiles(spec: JobSpec, search: Search | None) -> list[Profile]:
    """The profiles that fit; none without a search."""
    if search is None:
        return []
    picks = search.fastest_for(int(spec.memory * share) for _, share in PLAN_PROFILES.values())
    fastest = min((search.seconds[choice] for choice in picks if choice is not None), default=0)
    profiles = []
    for (name, (thresholds, share)), choice in zip(PLAN_PROFILES.items(), picks, strict=True):
        if choice is None:
            continue
        memory_args = memory_arguments(
            spec.memory_args,
            choice,
            memory_profile=thresholds,
            target_memory_utilization=share,
            **dict.fromkeys(THRESHOLDS[1:]),  # the profile's
        )
        seconds, estimate = search.seconds[choice], search.estimates[choice]
        preset = choice.configured(spec.preset)
        profiles.append(Profile(name, share, choice, preset, memory_args, estimate, seconds, fastest / seconds))
    return profiles


def _far_too_large(spec: JobSpec) -> Rejected | None:
    """The reason not to search a method: without a trace, what it holds for certain exceeds the device."""
    if (alone := excessive_weights(spec)) is None:
        return None
    method = METHOD_TITLES[spec.preset.method]
    return Rejected(method, f"{method} needs at least {gib(alone[0])} for {alone[1]} alone, and {_budget(spec)}")


def _budget(spec: JobSpec) -> str:
    budget = spec.memory_budget
    return f"{budget / spec.memory:.0%} of {spec.preset.hardware.label} is {gib(budget)}"


def _too_large(spec: JobSpec, search: Search | None, smallest: Choice | None) -> Rejected:
    """The reason that a method does not fit at all."""
    method = METHOD_TITLES[spec.preset.method]
    if smallest is None:
        return Rejected(method, "no combination of settings works on this device: see hf-memopt doctor")
    estimate, needed = search.estimates[smallest], int(search.needs(smallest))
    if needed <= spec.memory_budget:
        reason = (
            f"{gib(estimate.host_bytes)} of host memory for each device, and {gib(spec.host_memory.bytes)} may be "
            f"used ({spec.host_memory.source})"
        )
        return Rejected(method, f"{method} needs {reason} ({summarize(smallest)}); --host-memory sets the limit")
    return Rejected(
        method,
        f"{method} needs at least {gib(needed)} ({summarize(smallest)}), and {_budget(spec)}",
    )
