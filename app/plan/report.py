"""A plan as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.capacity import About, capacity_fields
from app.plan.options import PlanOptions
from app.table import columns
from model_runner.core.capacity import Plan, cached_tokens
from model_runner.sizes import format_size


@dataclass(frozen=True, slots=True)
class Report:
    about: About
    stored: dict[str, Any]  # as model_description.Weights
    longest_context: int  # the model's, or what is taken for it where the configuration states none
    served_context: int  # that a server would take
    plan: Plan
    why_not_served: str  # "" when Plimsoll serves it
    how_used: str  # the device's memory, in words
    dtype_assumed: bool  # the configuration does not say what the model runs in
    options: PlanOptions

    @property
    def model(self) -> str:
        return self.about.model

    @property
    def device(self) -> str:
        return self.about.device

    @property
    def dtype(self) -> str:
        return self.about.weights_dtype


def as_json(report: Report) -> str:
    """Keys are documented in docs/plan.md. Bytes are of one device, times are seconds."""
    return json.dumps(capacity_fields(report.plan, report.about, report.why_not_served), indent=2)


def as_table(report: Report) -> str:
    parts = [_facts(report), _groups(report), _by_context(report), _by_batch(report), _notes(report)]
    return "\n\n".join(part for part in parts if part)


def _facts(report: Report) -> str:
    plan, each = report.plan, " of each device" if report.options.tensor_parallel > 1 else ""
    source = {"config": "counted from the configuration"}.get(
        report.stored["source"], f"from the {report.stored['source']} header"
    )
    stored = report.stored["stored_bytes"]
    as_stored = f", {format_size(stored)} as stored" if stored else ""
    rows = [
        ("model", f"{report.model or 'the embedded model'} ({plan.spec.model_type})"),
        ("device", _device(report)),
        (
            "weights",
            f"{format_size(plan.weights.total_bytes)}{each}: {report.stored['parameters']:,} parameters in "
            f"{_weights_type(report)} ({source}{as_stored})",
        ),
        ("left for the cache", f"{format_size(plan.kv_budget_bytes)}{each}"),
        (
            "cache per token",
            f"{plan.spec.growing_bytes_per_token:,} bytes for as long as it grows, "
            f"{plan.spec.bytes_per_token:,} at first ({plan.spec.kv_dtype})",
        ),
    ]
    if plan.spec.fixed_bytes_per_sequence:
        rows.append(("state per sequence", format_size(plan.spec.fixed_bytes_per_sequence)))
    return "\n".join(f"{name:<20}{value}" for name, value in rows)


def _weights_type(report: Report) -> str:
    if report.dtype == "packed":
        return f"{report.stored['quantisation']}: {report.stored['packing']}"
    return "the stored types" if report.dtype == "stored" else report.dtype


def _device(report: Report) -> str:
    plan, ranks = report.plan, report.options.tensor_parallel
    speed = f", {plan.device.bandwidth / 1e9:,.0f} GB/s" if plan.device.bandwidth else ""
    memory = format_size(plan.device.memory_bytes)
    name = f"{report.device}: {memory}" if report.device.lower() not in (memory.lower(), "") else memory
    several = f"{ranks} of " if ranks > 1 else ""
    return f"{several}{name}{speed}; {report.how_used}"


def _groups(report: Report) -> str:
    rows = [("layers", "kind", "keeps", "per token", "per sequence")]
    for group in report.plan.spec.groups:
        reach = "all" if group.reach is None else f"{group.reach:,} tokens"
        rows.append(
            (
                str(len(group.layers)),
                group.kind,
                {"recurrent": "a state", "shared": "nothing"}.get(group.kind, reach),
                f"{group.bytes_per_token:,} B" if group.bytes_per_token else "-",
                format_size(group.sequence_bytes(cached_tokens(report.longest_context))),
            )
        )
    title = f"What it needs, by layer group (per sequence: at a context of {report.longest_context:,})"
    return f"{title}\n{columns(rows, indent=2)}"


def _by_context(report: Report) -> str:
    plan = report.plan
    served, timed = plan.layout is not None, plan.device.bandwidth is not None
    head = ["context", "needs", "batch"]
    head += ["Plimsoll allocates", "batch"] if served else []
    head += ["step at least", "tokens/s at most", "half of ceiling at"] if timed else []
    rows = [tuple(head)]
    for at in plan.contexts:
        row = [f"{at.context:,}", format_size(at.sequence_bytes), _count(at.max_sequences)]
        if served:
            assert at.allocated_bytes is not None
            row += [format_size(at.allocated_bytes), _count(at.max_sequences_allocated)]
        if timed:
            half = "-" if at.half_ceiling_batch is None else f"{at.half_ceiling_batch:,.1f}"
            row += [_milliseconds(at.step_seconds), _speed(at.tokens_per_second), half]
        rows.append(tuple(row))
    return f"The largest batch at each context\n{columns(rows, indent=2)}"


def _by_batch(report: Report) -> str:
    plan = report.plan
    served, timed = plan.layout is not None, plan.device.bandwidth is not None
    head = ["batch", "longest context"]
    head += ["with Plimsoll"] if served else []
    head += ["step at least", "tokens/s at most"] if timed else []
    rows = [tuple(head)]
    for at in plan.batches:
        row = [f"{at.sequences:,}", f"{at.longest_context:,}"]
        row += [f"{at.longest_context_allocated:,}"] if served else []
        row += [_milliseconds(at.step_seconds), _speed(at.tokens_per_second)] if timed else []
        rows.append(tuple(row))
    whose = "the model's own is" if report.about.model_context else "the model states none; planned up to"
    title = f"The longest context of each batch ({whose} {report.longest_context:,})"
    return f"{title}\n{columns(rows, indent=2)}"


def _notes(report: Report) -> str:
    notes = []
    if report.why_not_served:
        notes.append(textwrap.fill(report.why_not_served, 98))
    if assumed := quantisation_note(report.stored, report.dtype):
        notes.append(textwrap.fill(assumed, 98))
    if uncounted := report.stored["uncounted"]:
        notes.append(
            textwrap.fill(
                f"Not counted in the weights, because its size can't be told from the configuration: what "
                f"{', '.join(uncounted)} describes. The headers of the model's files would tell.",
                98,
            )
        )
    if report.plan.weights.unread_bytes:
        notes.append(
            f"Of the weights, {format_size(report.plan.weights.unread_bytes)} are held and not read by a "
            f"step: {', '.join(report.stored['unread'])}."
        )
    if report.dtype_assumed:
        notes.append("The configuration does not say what the model runs in; bfloat16 is taken.")
    if report.about.model_context is None:
        notes.append(
            f"The configuration states no longest context; {report.longest_context:,} tokens are planned."
        )
    elif any(at.context > report.longest_context for at in report.plan.contexts):
        notes.append(
            f"The model was made for {report.longest_context:,} tokens; longer contexts are priced all the "
            "same."
        )
    if report.plan.layout is not None and report.served_context < report.longest_context:
        notes.append(
            f"Plimsoll serves up to {report.served_context:,} tokens: beyond, this model turns positions "
            "otherwise in a\nbatch than alone (longrope)."
        )
    if report.plan.device.bandwidth is None:
        notes.append("Without --memory-bandwidth, or a card's name, there is no speed to tell.")
    else:
        notes.append(
            "A step reads the weights and every sequence's cache once. Past the batch in the last column\n"
            "the caches outweigh the weights, and a larger batch brings less than half of what it costs."
        )
    if report.plan.weights.expert_bytes and report.plan.weights.experts:
        weights = report.plan.weights
        notes.append(
            f"Each token uses {weights.experts_per_token} of {weights.experts} experts a layer; a step reads "
            "those that any of its tokens uses, drawn evenly."
        )
    return "\n".join(notes)


def quantisation_note(stored: Mapping[str, Any], kept_in: str) -> str:
    """What was taken for granted of weights that the configuration says are quantised; "" where nothing."""
    method = stored["quantisation"]
    if not method or kept_in == "stored":
        return ""
    says = f"The configuration says that the weights are quantised ({method})"
    if kept_in == "packed":
        return (
            f"{says}, and there are no files to measure: counted at {stored['packing']}, and what is not "
            "packed as the model runs."
        )
    if stored["packing"]:
        return f"{says}; here they are counted in {kept_in}, as was asked."
    return (
        f"{says} in a way that it does not tell the size of; here they are counted in {kept_in}: only the "
        "files' headers would tell what they take."
    )


def _count(count: int | None) -> str:
    return "any" if count is None else f"{count:,}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f} ms"


def _speed(tokens_per_second: float | None) -> str:
    return "-" if tokens_per_second is None else f"{tokens_per_second:,.0f}"
