"""The flags of a job, looked at without Megatron's parser: what can be told from the words alone.

Megatron itself checks far more when it starts, and NTP does then (integration.refusals). This is
the part that can be known on a login node, in a second.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron_ntp.doctor.findings import Finding, fail, note, ok, warn
from megatron_ntp.errors import PlanError
from megatron_ntp.integration.refusals import refuse_unsupported
from megatron_ntp.plan.model import ModelDims, num_mlp_matrices
from megatron_ntp.plan.plan import Plan
from megatron_ntp.plan.topology import Topology, format_degrees, parse_degrees, parse_failed
from megatron_ntp.settings import NTPSettings, add_arguments

SUBJECT = "flags"


class GivenWords(argparse.Namespace):
    """What the words of a command line say, under the names that Megatron would use.

    Any other argument is None, as for a flag that was not given.
    """

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(optimizer="adam")
        for place, word in enumerate(words):
            if word.startswith("--"):
                name, equals, value = word[2:].partition("=")
                if not equals:
                    following = words[place + 1] if place + 1 < len(words) else "--"
                    value = "" if following.startswith("--") else following
                setattr(self, _argument(name), _value(value))

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _argument(flag: str) -> str:
    spelled = {"fp8-format": "fp8", "fp4-format": "fp4", "use-nccl-ub": "nccl_ub"}
    return spelled.get(flag, flag.replace("-", "_"))


def _value(text: str) -> Any:
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            pass
    return text or True


def check_flags(words: Sequence[str]) -> list[Finding]:
    """Findings about a job's command line; `words` may begin with its script."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    try:
        known, rest = add_arguments(parser, words).parse_known_args(list(words))
    except (PlanError, argparse.ArgumentError) as error:
        return [fail(SUBJECT, str(error), "see `megatron-ntp flags`")]
    unknown = [word for word in rest if word.startswith("--ntp")]
    if unknown:
        text = f"no such flag: {', '.join(unknown)}"
        return [fail(SUBJECT, text, "see `megatron-ntp flags`")]
    settings = NTPSettings.from_namespace(known)
    if not settings.ntp:
        if settings != NTPSettings():
            return [fail(SUBJECT, "--ntp-... flags without --ntp", "add --ntp, or remove them")]
        return [note(SUBJECT, "no --ntp among them: Megatron would run untouched")]
    given = GivenWords(words)
    findings = _refusals(given)
    try:
        findings += _shape(settings, given)
    except PlanError as error:
        findings.append(fail(SUBJECT, str(error), "correct the flags"))
    return findings


def _refusals(given: GivenWords) -> list[Finding]:
    try:
        refuse_unsupported(given)
    except PlanError as error:
        first, *lines = str(error).splitlines()
        return [fail(SUBJECT, line.strip(), first.rstrip(":")) for line in lines]
    return [ok(SUBJECT, "nothing that --ntp refuses, as far as the words tell")]


def _shape(settings: NTPSettings, given: GivenWords) -> list[Finding]:
    """The job's degrees, and whether the model can be cut for them."""
    if settings.ntp_plan is not None:
        plan = Plan.load(settings.ntp_plan)
        return [ok(SUBJECT, f"plan {settings.ntp_plan}: {_described(plan.topology)}")]
    nominal_tp: int = given.tensor_model_parallel_size or 1
    failed = None if settings.ntp_failed is None else parse_failed(settings.ntp_failed)
    if settings.ntp_degrees is not None:
        topology = Topology.from_degrees(parse_degrees(settings.ntp_degrees), nominal_tp, failed)
    elif failed:
        num_replicas = 1 + max(replica for replica, _ in failed)
        topology = Topology.from_failed(num_replicas, nominal_tp, failed)
    else:
        topology = Topology.from_degrees((nominal_tp,))
    findings = []
    if settings.ntp_degrees is not None:
        findings.append(ok(SUBJECT, _described(topology)))
    if topology.is_uniform:
        findings.append(note(SUBJECT, "no replica is reduced: nothing will be resharded"))
    dims = model_dims(given)
    if dims is None:
        text = "model sizes are not among them: not checked whether the model can be cut"
        return [*findings, note(SUBJECT, text)]
    slowness = Plan(topology, dims).slowness(topology.sync_degree)
    if slowness > 1:
        degree = topology.sync_degree
        text = f"a replica of degree {degree} needs about {slowness:.2f} x the time per microbatch"
        cure = "--ntp-batch-policy redistribute or shrink gives it fewer; `megatron-ntp plan`"
        kept = settings.ntp_batch_policy in (None, "keep")
        findings.append(warn(SUBJECT, text, cure) if kept else ok(SUBJECT, text))
    return findings


def _described(topology: Topology) -> str:
    return (
        f"degrees {format_degrees(topology.degrees)} of TP {topology.nominal_tp}: "
        f"{topology.world_size} processes"
    )


def model_dims(given: GivenWords) -> ModelDims | None:
    """The model's sizes as Megatron would derive them, if the words give the main ones."""
    hidden: Any = given.hidden_size
    heads: Any = given.num_attention_heads
    if not hidden or not heads:
        return None
    nominal_tp: int = given.tensor_model_parallel_size or 1
    divisor = (given.make_vocab_size_divisible_by or 128) * nominal_tp
    vocab: int = given.padded_vocab_size or given.vocab_size or divisor
    ffn = int(4 * hidden * 2 / 3 / 64) * 64 if given.swiglu else 4 * hidden
    return ModelDims(
        num_attention_heads=heads,
        num_query_groups=(given.num_query_groups if given.group_query_attention else None) or heads,
        kv_channels=given.kv_channels or hidden // heads,
        hidden_size=hidden,
        ffn_hidden_size=given.ffn_hidden_size or ffn,
        padded_vocab_size=-(-vocab // divisor) * divisor,
        num_layers=given.num_layers or 1,
        mlp_matrices=num_mlp_matrices(given),
    )
