"""The privacy ledger: a run reserves its privacy budget before it reads private data.

Budget of rounds that were started is never refunded. Modules: `records` (one signed entry), `chain`
(the hash chain of records in a store), `state` (the replayed records), `terms` (the fixed terms of
a policy), `budget` (the composed privacy loss of runs), `admission` (whether a run may be charged),
`external` (losses of releases made elsewhere). Every operation that adds a record is a method of
`Ledger`. Specification: docs/explanation/ledger.md#rules.
"""

# First: it defers the `__init__` of dp_accounting.
import fedemb.privacy  # noqa: F401  # pyright: ignore[reportUnusedImport]
from fedemb.ledger.budget import Charge as Charge
from fedemb.ledger.budget import Spent as Spent
from fedemb.ledger.ledger import Ledger as Ledger
from fedemb.ledger.records import Anchor as Anchor
from fedemb.ledger.records import Reservation as Reservation
from fedemb.ledger.records import read_reservation as read_reservation
from fedemb.ledger.root import as_owner as as_owner
from fedemb.ledger.root import check_high_water as check_high_water
from fedemb.ledger.root import ensure_policy_key as ensure_policy_key
from fedemb.ledger.root import ensure_trust as ensure_trust
from fedemb.ledger.root import find_rollback_anchor as find_rollback_anchor
from fedemb.ledger.root import init_policy as init_policy
from fedemb.ledger.root import mark_high_water as mark_high_water
from fedemb.ledger.root import name_approvers as name_approvers
from fedemb.ledger.root import open_ledger as open_ledger
from fedemb.ledger.root import policies as policies
from fedemb.ledger.root import read_trust as read_trust
from fedemb.ledger.root import refuse_emptied as refuse_emptied
from fedemb.ledger.root import rotate_keys as rotate_keys
from fedemb.ledger.terms import PlannedSeries as PlannedSeries
from fedemb.ledger.terms import PolicyTerms as PolicyTerms
from fedemb.ledger.terms import UserTerms as UserTerms
from fedemb.ledger.terms import blocks_of as blocks_of
from fedemb.ledger.terms import charged_content as charged_content
from fedemb.ledger.terms import series_of as series_of
from fedemb.ledger.terms import terms_of as terms_of
