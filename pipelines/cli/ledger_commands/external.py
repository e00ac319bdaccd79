"""`fedemb ledger charge`: declares the loss of a release made elsewhere on the same users."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Annotated

import typer

from fedemb.pipelines.cli.ledger_commands.ledger_write import Act, reason_text
from fedemb.pipelines.cli.option_groups import grouped
from fedemb.pipelines.output import say


class Relation(StrEnum):
    """Neighbouring relations of a declared loss."""

    ADD_OR_REMOVE_ONE = "ADD_OR_REMOVE_ONE"
    REPLACE_ONE = "REPLACE_ONE"


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The declared loss in one of two forms."""

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
        list[str] | None,
        typer.Option("--blocks", help="User blocks; repeatable; default: all, now and later."),
    ] = None,
    act: Act,
) -> None:
    """Charge a private release that was made elsewhere on the same users. For the policy owner.

    Example: fedemb ledger charge survey-2027 --rho 0.1 --ledger policy/ledger --keys policy/keys
    --reason "Quarterly survey of the analytics team"
    """
    from fedemb.documents.ledger_record import ChargeRecord
    from fedemb.ledger import as_owner

    opened, key_store = act.open()
    fields = {**vars(loss), "relation": loss.relation.value, "name": name, "blocks": blocks or []}
    declared = ChargeRecord.model_construct(**fields, reason=reason_text(act.reason))
    before = {block: opened.spent(block).epsilon for block in blocks or opened.state.by_block}
    write = partial(opened.charge, declared)
    record = as_owner(opened, key_store, act.rollback_anchor, write)
    say(f"external charge {name!r} is record {record.sequence}, as declared and not checked")
    cap = opened.terms.epsilon_cap
    for block, epsilon in before.items():
        after = opened.spent(block).epsilon
        over = "" if after <= cap else "; above the cap: no run is admitted, no model is released"
        say(f"  {block}: epsilon {epsilon:.4g} -> {after:.4g} of the cap {cap:g}{over}")
