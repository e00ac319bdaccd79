"""`fedemb ledger`: who spent what of the privacy budget, and what is left.

`fedemb ledger charge`: declares the loss of a release made elsewhere on the same users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedemb.errors import InputError, Refused
from fedemb.pipelines.cli.options import JsonOption, PolicyOption, SetOption, TrustOption, grouped
from fedemb.pipelines.output import say, say_json

if TYPE_CHECKING:
    from fedemb.config import RunConfig
    from fedemb.keys import KeyStore
    from fedemb.ledger import Ledger
    from fedemb.ledger.state import LedgerState
    from fedemb.pipelines.run.load_config import PolicyPlaces

PolicyIdOption = Annotated[
    str | None, typer.Option("--policy-id", help="Policy; default: the only one of the ledger.")
]
RollbackAnchorOption = Annotated[
    str | None,
    typer.Option(
        "--rollback-anchor", help="Store of the rollback anchor, as in storage.rollback_anchor."
    ),
]
ReasonOption = Annotated[
    str, typer.Option("--reason", help="Reason; stays in the ledger permanently.")
]


app = typer.Typer(
    help="Show, verify and change the privacy ledger of a policy.", no_args_is_help=True
)


@dataclass(frozen=True, kw_only=True)
class Where:
    """Options that say where a policy is: in a folder, or each store by itself."""

    policy: PolicyOption = None
    ledger: Annotated[
        str | None, typer.Option("--ledger", help="Root of the ledgers: path, gs://, s3://.")
    ] = None
    keys: Annotated[
        str | None, typer.Option("--keys", help="Key store: a folder or gsm://project.")
    ] = None

    @property
    def places(self) -> PolicyPlaces:
        """The ledger and the key store."""
        from fedemb.pipelines.run.load_config import PolicyPlaces

        return PolicyPlaces(self.ledger, self.keys).in_folder(self.policy)


@dataclass(frozen=True, kw_only=True)
class Act(Where):
    """Options of an act on a policy that is recorded with a reason."""

    reason: ReasonOption = ""
    policy_id: PolicyIdOption = None
    rollback_anchor: RollbackAnchorOption = None

    def open(self) -> tuple[Ledger, KeyStore]:
        """Returns the ledger, all signatures verified, not older than its marks, and its keys.

        Raises:
          Refused: the policy has a rollback anchor, and it was not named.
        """
        from fedemb.keys import open_key_store
        from fedemb.ledger import check_high_water, find_rollback_anchor
        from fedemb.pipelines.cli.ledger_summary import load

        opened = load(self.places.named("ledger"), self.policy_id, None, signatures=True)
        key_store = open_key_store(self.places.named("keys"))
        named = [self.rollback_anchor or ""]
        anchor = find_rollback_anchor(opened, [*filter(None, named)])
        check_high_water(opened, key_store, anchor)
        return opened, key_store


@app.command()
@grouped
def void(
    *, run_id: Annotated[str, typer.Argument(help="Run whose reservation is returned.")], act: Act
) -> None:
    """Return the reservation of a run that will not train; refused once training was bound.

    Example: fedemb ledger void week-2 --policy policy --reason "wrong data"
    """
    from fedemb.ledger.records import Reservation

    opened, key_store = act.open()
    opened.unlock(key_store)
    found = opened.state.attempts.get((run_id, opened.state.last_attempt(run_id)))
    if found is None:
        raise InputError(
            f"The ledger of policy {opened.policy_id!r} has no run {run_id!r}. Run `fedemb "
            "ledger show` to list the runs."
        )
    record = opened.void(Reservation.of(found.reserve.document), reason_text(act.reason), key_store)
    say(
        f"run {run_id} attempt {record.attempt} is given back as record {record.sequence}: it "
        "charges nothing"
    )


@app.command(name="rotate-keys")
@grouped
def rotate(
    *,
    where: Where,
    reason: ReasonOption,
    role: Annotated[
        list[str] | None,
        typer.Option("--role", metavar="ROLE", help="Role of the key; repeatable; default: all."),
    ] = None,
    rollback_anchor: Annotated[
        list[str] | None,
        typer.Option(
            "--rollback-anchor",
            metavar="URI",
            help="Store of a policy's rollback anchor; repeatable.",
        ),
    ] = None,
) -> None:
    """Replace the signing keys in all policies of a ledger. For the policy owner.

    Earlier signatures of a retired key stay trusted; later ones are not.

    Example: fedemb ledger rotate-keys --policy policy --reason "yearly rotation"
    """
    from fedemb.documents.ledger_record import KeysRecord
    from fedemb.keys import open_key_store
    from fedemb.keys.trust import ROLES
    from fedemb.ledger import rotate_keys

    unknown = sorted(set(role or ()) - set(ROLES))
    if unknown:
        raise InputError(f"--role {unknown[0]!r} is unknown. Pass one of {', '.join(ROLES)}.")
    written = rotate_keys(
        where.places.named("ledger"),
        open_key_store(where.places.named("keys")),
        reason_text(reason),
        role or ROLES,
        rollback_anchors=rollback_anchor or (),
    )
    for record in written:
        names = ", ".join(str(key["role"]) for key in record.content(KeysRecord).keys)
        say(
            f"policy {record.policy_id}: record {record.sequence} names new signing keys of {names}"
        )
    say("pinned copies of trust.json stay valid: the ledger leads from them to the new keys")
    say("a step that was running meanwhile ends with exit code 4; resume its run")


def reason_text(reason: str) -> str:
    """A reason that says something, for a record that stays."""
    if not reason.strip():
        raise InputError("--reason is empty. Pass a reason without user ids.")
    return reason.strip()


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


@app.command()
@grouped
def charge(
    *,
    name: Annotated[str, typer.Argument(help="Unique name of the release.")],
    loss: Loss,
    blocks: Annotated[
        list[str] | None,
        typer.Option(metavar="BLOCK", help="User block; repeatable; default: all, now and later."),
    ] = None,
    act: Act,
) -> None:
    """Charge a private release that was made elsewhere on the same users. For the policy owner.

    Example: fedemb ledger charge survey-2027 --rho 0.1 --policy policy --reason
    "Quarterly survey"
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


ConfigOption = Annotated[
    str | None, typer.Option("--config", "-c", help="Configuration to price: YAML file or preset.")
]


@dataclass(frozen=True, kw_only=True)
class Reading(Where):
    """Options of a command that reads a ledger; the keys refuse one older than their markers."""

    policy_id: PolicyIdOption = None
    trust: TrustOption = None
    rollback_anchor: RollbackAnchorOption = None

    def open(self, policy: str | None = None, *, signatures: bool) -> Ledger:
        """Returns the ledger of a policy, see `ledger_summary.load`."""
        from fedemb.keys.trust import TrustStore
        from fedemb.pipelines.cli.ledger_summary import load

        trust = TrustStore.load(self.trust) if self.trust else None
        root = self.places.named("ledger")
        return load(root, self.policy_id or policy, trust, signatures=signatures)

    def marks(self, ledger: Ledger) -> int | None:
        """Returns the number of markers the ledger matches; None: their location is unknown."""
        from fedemb.keys import open_key_store
        from fedemb.ledger import check_high_water

        named = self.places.keys
        if named is None and self.rollback_anchor is None:
            return None
        keys = open_key_store(named) if named else None
        return check_high_water(ledger, keys, self.rollback_anchor)


@app.command()
@grouped
def init(
    *,
    config: Annotated[str, typer.Option("--config", "-c", help="YAML file or preset.")],
    where: Where,
    set_: SetOption = None,
    trust_output: Annotated[
        Path | None, typer.Option(help="File to write the public keys to, for recipients.")
    ] = None,
) -> None:
    """Create the ledger of a policy; its terms are fixed for its lifetime.

    Example: fedemb ledger init --config run.yaml --ledger gs://LEDGER --keys
    gsm://PROJECT/fedemb --trust-output trust.json
    """
    from fedemb.keys import open_key_store
    from fedemb.ledger import (
        ensure_trust,
        init_policy,
        open_ledger,
        policies,
        refuse_emptied,
        series_of,
        terms_of,
    )
    from fedemb.pipelines.cli.ledger_summary import composition
    from fedemb.pipelines.run.load_config import load_config
    from fedemb.privacy.registry import plan_mechanism
    from fedemb.release.plan import check_first_run
    from fedemb.storage import open_store

    settings = load_config(config, set_ or [])
    check_first_run(settings)
    series = series_of(settings, plan_mechanism(settings))
    ledger = where.places.named("ledger")
    key_store = open_key_store(where.places.named("keys"))
    trust = ensure_trust(open_store(ledger), key_store)
    opened = open_ledger(ledger, settings.policy.policy_id, trust=trust)
    terms = terms_of(settings, series)
    refuse_emptied(opened, key_store)
    init_policy(opened, terms, key_store, settings.storage.rollback_anchor)
    if trust_output is not None:
        trust.save(trust_output)
    say(
        f"policy {settings.policy.policy_id}: cap epsilon {terms.epsilon_cap:g} per user block at "
        f"delta {terms.delta:g}, {composition(terms)}; "
        f"public keys: {trust_output or ledger + '/trust.json'}"
    )
    others = [other for other in policies(open_store(ledger)) if other != opened.policy_id]
    if others:
        say(
            f"note: this ledger also contains {', '.join(others)}. On the same users the "
            "epsilons add up"
        )


@app.command()
@grouped
def show(
    *,
    reading: Reading,
    config: ConfigOption = None,
    set_: SetOption = None,
    min_remaining: Annotated[
        float | None,
        typer.Option(help="Exit with code 3 if a block has less epsilon left. [no limit]", min=0),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Show spent and remaining budget.

    With --config: whether such a run would be admitted, how many more fit, and until when.

    Example: fedemb ledger show --policy policy --config mine.yaml --min-remaining 1
    """
    from fedemb.pipelines.cli import ledger_summary as text

    planned: RunConfig | None = None
    if config is not None:
        from fedemb.pipelines.run.load_config import load_config

        planned = load_config(config, set_ or [])
    opened = reading.open(planned and planned.policy.policy_id, signatures=False)
    reading.marks(opened)
    forecast: dict[str, int | str | None] = {}
    if planned is not None:
        content = text.content_of(planned)
        fit = text.fitting(opened, content)
        due = text.first_run_without_budget(opened, content["blocks_requested"], fit)
        forecast = {
            "admission": text.admission(opened, planned),
            "more_runs_that_fit": fit,
            "first_run_without_budget": due and due.isoformat(timespec="seconds"),
        }
    if json_:
        say_json({**text.summary(opened), **forecast})
    else:
        _show(opened, forecast)
    if min_remaining is not None:
        worst = opened.state.worst_block()
        left = opened.terms.epsilon_cap - (opened.spent(worst).epsilon if worst else 0.0)
        if not left >= min_remaining:
            raise Refused(
                f"Only epsilon {left:.4g} is left, below --min-remaining {min_remaining:g}. Run "
                "less often, or continue under a new policy."
            )


def _show(opened: Ledger, forecast: Mapping[str, int | str | None]) -> None:
    from fedemb.pipelines.cli import ledger_summary as text

    terms = opened.terms
    say(
        f"policy {opened.policy_id}: cap epsilon {terms.epsilon_cap:g} per user block at delta "
        f"{terms.delta:g}, {text.composition(terms)}; "
        f"{text.counted(opened.head.sequence + 1, 'record')}"
    )
    if not opened.state.attempts:
        say("", "no run has reserved anything yet")
    else:
        _show_runs(opened)
    _show_decisions(opened.state)
    if forecast:
        say("", f"a run of this plan now: {forecast['admission']}")
        say(f"more runs of this plan that fit: {forecast['more_runs_that_fit']}")
    if due := forecast.get("first_run_without_budget"):
        say(f"at the mean interval of past runs, the first run without budget is due on {due}")


def _show_decisions(state: LedgerState) -> None:
    """Prints evaluations, approvers, external charges, decisions and rotations."""
    from fedemb.documents import ledger_record as kinds
    from fedemb.pipelines.cli import ledger_summary as text

    if state.evaluations:
        say("", f"held-out users were evaluated {text.counted(len(state.evaluations), 'time')}")
    if state.approvers:
        say("", f"who may approve releases: {', '.join(sorted(state.approvers.values()))}")
    for record in (*state.external, *state.decisions, *state.rotations):
        match record.document.body.body:
            case kinds.ChargeRecord() as made:
                where = ", ".join(made.blocks) or "all blocks"
                did = f"declared the external charge {made.name!r} on {where}: {made.reason}"
            case kinds.DecisionRecord() as made:
                did = f"waived {made.code} ({made.reason})"
                if made.report_sha is not None:
                    did = f"approved report {made.report_sha[:12]}"
                did += f" for model {made.model_sha[:12]}"
            case kinds.KeysRecord() as made:
                roles = ", ".join(str(key["role"]) for key in made.keys)
                did = f"named new signing keys of {roles}: {made.reason}"
            case _:
                continue
        say("", f"record {record.sequence}, {record.time}: {record.actor} {did}")


def _show_runs(opened: Ledger) -> None:
    from fedemb.pipelines.cli import ledger_summary as text

    state, shown = opened.state, text.RUNS_SHOWN
    say("", "blocks, most spent first")
    blocks = {block: state.spent(block) for block in sorted(state.by_block)}
    for block in sorted(blocks, key=lambda block: -blocks[block].epsilon)[:shown]:
        spent = blocks[block]
        say(
            f"  {block:<20} spent {spent.epsilon:<8.4g} "
            f"left {opened.terms.epsilon_cap - spent.epsilon:<8.4g} "
            f"{text.counted(spent.charges, 'charge')}"
        )
    runs = list(state.attempts.values())
    say("", f"runs, the last {min(shown, len(runs))} of {len(runs)}")
    for attempt in runs[-shown:]:
        record, charge = attempt.reserve, attempt.charge
        charged = charge.rounds_charged if attempt.charged else 0
        said = f"charged {charged} of {charge.rounds} rounds"
        by = "" if record.actor == "unnamed" else f"  by {record.actor}"
        say(
            f"  {record.time[:16].replace('T', ' ')} UTC  {record.run_id:<24} "
            f"{attempt.status:<10} {said}{by}"
        )


@app.command()
@grouped
def verify(
    *,
    reading: Reading,
    anchor: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SEQUENCE:SHA256", help="A record that was noted elsewhere; repeatable."
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Verify bytes, chain, signatures, rules and caps of the whole ledger.

    Example: fedemb ledger verify --policy policy --trust trust.json
    """
    from fedemb.ledger import Anchor
    from fedemb.pipelines.cli import ledger_summary as text

    anchors = []
    for item in anchor or []:
        sequence, _, sha = item.partition(":")
        if not sequence.isdecimal():
            raise InputError(f"--anchor {item!r} is not valid. Pass SEQUENCE:SHA256.")
        anchors.append(Anchor(int(sequence), sha, "--anchor"))
    opened = reading.open(signatures=True)
    opened.verify(anchors)
    marks, head = reading.marks(opened), opened.head
    if json_:
        answer = {"verified": True, "sequence": head.sequence, "sha": head.sha, "marks": marks}
        say_json(answer, indent=None)
        return
    say(
        f"verified: {text.counted(head.sequence + 1, 'record')} of policy {opened.policy_id}, "
        f"head {head.sha}"
    )
    if marks is None:
        say("ledger freshness not checked; pass --keys or --rollback-anchor to check it")
    else:
        say(f"it is the newest that is marked: {text.counted(marks, 'record')} of its charges")
