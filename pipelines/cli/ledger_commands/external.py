"""`fedemb ledger charge`: declares the loss of a release made elsewhere on the same users."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedemb.errors import InputError
from fedemb.foundation.canonical_json import JsonObject, strict_json
from fedemb.pipelines.cli.ledger_commands.ledger_write import Act, reason_text
from fedemb.pipelines.cli.option_groups import grouped
from fedemb.pipelines.output import say


class Relation(StrEnum):
    """Neighbouring relations of a declared loss."""

    ADD_OR_REMOVE_ONE = "ADD_OR_REMOVE_ONE"
    REPLACE_ONE = "REPLACE_ONE"


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The declared loss in one of three forms."""

    event: Annotated[
        Path | None,
        typer.Option(help="JSON file of the event, as in accounting.event of a report."),
    ] = None
    epsilon: Annotated[float | None, typer.Option(help="Epsilon above 0.")] = None
    delta: Annotated[float, typer.Option(help="Delta of --epsilon, in [0, 1).")] = 0.0
    rho: Annotated[float | None, typer.Option(help="Rho of zCDP, above 0.")] = None
    relation: Annotated[Relation, typer.Option(help="Change of one unit that the loss covers.")] = (
        Relation.ADD_OR_REMOVE_ONE
    )


@grouped
def charge(
    *,
    name: Annotated[str, typer.Argument(help="Unique name of the release.")],
    loss: Loss,
    blocks: Annotated[
        list[str] | None, typer.Option("--blocks", help="User blocks; repeatable. [all blocks]")
    ] = None,
    act: Act,
) -> None:
    """Charge a private release that was made elsewhere on the same users. For the policy owner.

    Example: fedemb ledger charge survey-2027 --rho 0.1 --blocks all/0 --ledger policy/ledger
    --keys policy/keys --reason "Quarterly survey of the analytics team"
    """
    from fedemb.ledger import charge_external
    from fedemb.ledger.budget import DeclaredCharge
    from fedemb.ledger.external import declared_loss

    opened, key_store = act.open()
    event, delta = declared_loss(
        opened.terms.renyi_order,
        event=_read(loss.event),
        epsilon=loss.epsilon,
        delta=loss.delta,
        rho=loss.rho,
    )
    form = "event" if loss.event else "rho" if loss.rho is not None else "epsilon_delta"
    terms = opened.terms
    named = blocks or sorted(opened.state.by_block)
    if not named:
        raise InputError("the ledger has no block yet; name the user blocks with --blocks")
    body: DeclaredCharge = {
        "name": name,
        "blocks": named,
        "unit": terms.unit,
        "relation": loss.relation.value,
        "event": event,
        "delta": delta,
        "declared": form,
        "reason": reason_text(act.reason),
    }
    before = {block: opened.spent(block).epsilon for block in named}
    record = charge_external(opened, body, key_store, act.rollback_anchor)
    say(f"external charge {name!r} is record {record.sequence}, as declared and not checked")
    for block in named:
        after = opened.spent(block).epsilon
        over = "; above the cap: no run is admitted, no model is released"
        say(
            f"  {block}: epsilon {before[block]:.4g} -> {after:.4g} of the cap "
            f"{terms.epsilon_cap:g}{'' if after <= terms.epsilon_cap else over}"
        )


def _read(path: Path | None) -> JsonObject | None:
    if path is None:
        return None
    try:
        value = strict_json(path.read_bytes(), path.name)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}. Check --event.") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} is not a JSON object. Pass the event of the release.")
    return value
