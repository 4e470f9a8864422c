"""Build the report of a preparation: counts by reason, rule and domain, with examples."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from recipes.files import count
from recipes.prepare.chunk import MAX_EXAMPLES, MAX_LISTED, SHOWN_CHARACTERS, Facts, empty_facts
from recipes.prepare.contamination import EvaluationSet
from recipes.prepare.near_duplicates import Bools, Copies
from recipes.prepare.quality import RULES
from recipes.prepare.survivors import Survivors

EXACT, NEAR = "exact copy", "near copy"
_PLURALS = {EXACT: "exact copies", NEAR: "near copies"}


def describe_dropped(reason: str, number: int) -> str:
    """Return the number of documents that were dropped for a reason, `2 exact copies` or `2 quality`."""
    return count(number, reason, _PLURALS.get(reason, reason))


def merge(parts: Iterable[Facts]) -> Facts:
    """Return the facts of all chunks, given in order."""
    whole = empty_facts()
    for facts in parts:
        for name, domain in facts["domains"].items():
            known = whole["domains"][name]
            for key in ("documents", "bytes"):
                known[key] += domain[key]
            for key in ("dropped", "dropped_bytes"):
                known[key].update(domain[key])
        for name, rule in facts["rules"].items():
            total = whole["rules"][name]
            for key in ("failed", "first"):
                total[key] += rule[key]
            total["domains"].update(rule["domains"])
            total["examples"] = (total["examples"] + rule["examples"])[:MAX_EXAMPLES]
        whole["lines"].update(facts["lines"])
        for key in ("unreadable", "contaminated"):
            whole[key] = (whole[key] + facts[key])[:MAX_LISTED]
        for item, coverage in facts["items"].items():
            whole["items"][item] = max(coverage, whole["items"][item])
    return whole


def count_copies(facts: Facts, survivors: Survivors, dropped: Mapping[str, Bools]) -> None:
    """Add the copies to the dropped documents of each domain.

    Args:
        facts: Facts of all chunks; changed in place.
        survivors: Documents that passed the first pass.
        dropped: [N] each, True for the copies of a kind.
    """
    for reason, is_copy in dropped.items():
        for domain in np.unique(survivors.domains[is_copy]).tolist():
            here = is_copy & (survivors.domains == domain)
            known = facts["domains"][domain]
            known["dropped"][reason] += int(here.sum())
            known["dropped_bytes"][reason] += int(survivors.text_bytes[here].sum())


def make_report(
    facts: Facts,
    survivors: Survivors,
    *,
    rules: Mapping[str, Any],
    near: Copies | None,
    evaluation: EvaluationSet | None,
    settings: Mapping[str, Any],
) -> Facts:
    """Return the content of `report.json`; equal for equal documents and settings.

    Args:
        facts: Facts of all chunks, including the copies.
        survivors: Documents that passed the first pass.
        rules: Limits by name.
        near: Near copies found; None: near copies are kept.
        evaluation: Evaluation items that documents must not contain; None: not checked.
        settings: Settings of the user.
    """
    domains = {name: _with_kept(domain) for name, domain in sorted(facts["domains"].items())}
    dropped: Counter[str] = Counter()
    dropped_bytes: Counter[str] = Counter()
    for domain in domains.values():
        dropped.update(domain["dropped"])
        dropped_bytes.update(domain["dropped_bytes"])
    totals = {key: sum(domain[key] for domain in domains.values()) for key in ("documents", "bytes")}
    whole = _with_kept({**totals, "dropped": dropped, "dropped_bytes": dropped_bytes})
    return {
        "settings": dict(settings),
        **whole,
        "domains": domains,
        "rules": [
            {"rule": name, "limit": rules[name], "description": RULES[name].description, **_rule_facts(facts, name)}
            for name in RULES
            if rules.get(name) is not None
        ],
        "unreadable": facts["unreadable"],
        "largest_copies": _largest_exact(survivors) + ([] if near is None else _largest_near(survivors, near)),
        "near_copies": None if near is None else {"compared": near.num_compared, "not_compared": near.num_not_compared},
        "evaluation": None if evaluation is None else _evaluation_facts(facts, evaluation),
    }


def _with_kept(domain: Facts) -> Facts:
    lost, lost_bytes = sum(domain["dropped"].values()), sum(domain["dropped_bytes"].values())
    return {
        "documents": domain["documents"],
        "bytes": domain["bytes"],
        "kept": domain["documents"] - lost,
        "kept_bytes": domain["bytes"] - lost_bytes,
        "dropped": dict(sorted(domain["dropped"].items())),
        "dropped_bytes": dict(sorted(domain["dropped_bytes"].items())),
    }


def _rule_facts(facts: Facts, name: str) -> Facts:
    if RULES[name].measure is None:
        return {"lines": facts["lines"][name]}
    found = facts["rules"][name]
    return {**found, "domains": dict(sorted(found["domains"].items()))}


def _largest_exact(survivors: Survivors) -> list[Facts]:
    """Return the most frequent documents among those that occur more than once."""
    firsts, counts = survivors.count_equal()
    order = np.lexsort((firsts, -counts))[:MAX_LISTED]
    return [
        _group(survivors, int(firsts[index]), int(counts[index]) - 1, EXACT) for index in order if counts[index] > 1
    ]


def _largest_near(survivors: Survivors, near: Copies) -> list[Facts]:
    counts = Counter(copy.original for copy in near.copies)
    lowest: dict[int, Any] = {}
    for copy in near.copies:
        if copy.original not in lowest or copy.similarity < lowest[copy.original].similarity:
            lowest[copy.original] = copy
    largest = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MAX_LISTED]
    return [
        _group(survivors, original, count, NEAR)
        | {
            "lowest_similarity": lowest[original].similarity,
            "least_similar": survivors.text(lowest[original].document)[:SHOWN_CHARACTERS],
        }
        for original, count in largest
    ]


def _group(survivors: Survivors, original: int, num_copies: int, kind: str) -> Facts:
    return {"kind": kind, "copies": num_copies, "text": survivors.text(original)[:SHOWN_CHARACTERS]}


def _evaluation_facts(facts: Facts, evaluation: EvaluationSet) -> Facts:
    coverages = facts["items"].values()
    return {
        "items": evaluation.num_items,
        "too_short": evaluation.num_too_short,
        "boilerplate": evaluation.num_boilerplate_items,
        "found": sum(coverage >= evaluation.min_coverage for coverage in coverages),
        "found_in_part": sum(coverage < evaluation.min_coverage for coverage in coverages),
        "documents": facts["contaminated"],
    }
