"""Every rule of the gate removed in turn: the tests that name its reason code must notice."""

from __future__ import annotations

from collections import Counter

from tests.planted_bugs.edits import Edit
from tests.planted_bugs.gate_reasons import named_codes, sites
from tests.planted_bugs.mutation import Mutant


def _without_each_rule() -> tuple[Mutant, ...]:
    """One bug for each reason that a rule yields: it yields none."""
    tests, seen, found = named_codes(), Counter[str](), []
    for site in sites():
        if site.fallback or not site.statement.startswith("yield "):
            continue
        name = f"gate_without_{site.codes[0] if len(site.codes) == 1 else site.function}"
        seen[name] += 1
        name += f"_{seen[name]}" if seen[name] > 1 else ""
        edit = Edit(site.module, site.function, site.statement, "yield from ()")
        named = tuple(dict.fromkeys(test for code in site.codes for test in tests.get(code, ())))
        found.append(Mutant(19, name, (edit,), named))
    return tuple(found)


MUTANTS = _without_each_rule()
