"""The test layers of tests/planted_bugs/README.md, as functions that return what is wrong.

Each takes a `System`: the real parts of a round, any of which a fault replaces.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.stats import chi2

from fedemb.privacy.accounting.accounting import price
from fedemb.privacy.accounting.events import event_from_json, event_to_json
from fedemb.privacy.accounting.guarantee import PrivacyGuarantee
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.privacy.mechanisms.registry import plan_from_json
from fedemb.privacy.queries import Mechanism, build_mechanism
from tests.kit.privacy_worlds import World

TARGET = 1_000
USERS = frozenset(range(120))
ROUNDS = 12
SHAPES = ((6, 4), (16,))
DIM = 40
INJECTED_TAG = b"the same noise in both worlds..."


def adversarial_update(users: tuple[int, ...], round_index: int) -> list[np.ndarray]:
    """Ten clips long, and its sign flips with the target: the worst a virtual client can do."""
    sign = -1.0 if TARGET in users else 1.0
    rng = np.random.default_rng([round_index, len(users) - (TARGET in users)])
    flat = rng.normal(size=DIM)
    flat *= sign * 10 / np.linalg.norm(flat)
    split = np.split(flat, [SHAPES[0][0] * SHAPES[0][1]])
    return [part.reshape(shape) for part, shape in zip(split, SHAPES, strict=True)]


def real_document(plan: MechanismPlan, delta: float = 1e-6) -> dict[str, Any]:
    guarantee = price(plan.event(), plan.relation, delta)
    return {
        "plan": plan.to_json(),
        "event": event_to_json(plan.event()),
        "relation": plan.relation.name,
        "guarantee": guarantee.to_json(),
    }


@dataclass
class System:
    """One round's machinery; the defaults are the product's."""

    plan: MechanismPlan
    index: Callable[[frozenset[int], int], Any] = World
    build: Callable[..., Mechanism] = build_mechanism
    update: Callable[[tuple[int, ...], int], list[np.ndarray]] = adversarial_update
    params: Callable[[Mechanism, list[Any]], Any] = lambda m, _: m.clip
    contribute: Callable[..., Any] = lambda m, params, update, users: m.query.preprocess_record(
        params, update
    )
    aggregate: Callable[..., Any] = lambda m, r, state, clients: m.aggregate(r, state)
    document: Callable[[MechanismPlan], dict[str, Any]] = real_document
    prepare: Callable[[Mechanism], None] = lambda m: None
    roots: tuple[bytes, bytes] = field(default=(bytes(range(32)), bytes(range(1, 33))))

    def mechanism(self, root: int = 0) -> Mechanism:
        m = self.build(self.plan, self.roots[root], "run", 0, "inputs")
        self.prepare(m)
        return m


@dataclass
class Trace:
    """What a round did."""

    contributions: dict[tuple[int, int], np.ndarray]
    total: np.ndarray
    noise: np.ndarray
    mean: np.ndarray


def play(system: System, users: frozenset[int], *, inject: bool) -> list[Trace]:
    """Runs the rounds on a data set, with the same noise in every world if `inject`."""
    m = system.mechanism()
    if inject:
        noise = m._noise
        noise.begin = lambda *_: setattr(noise, "tag", INJECTED_TAG)
    drawn = _recorded(m)
    world = system.index(users, system.plan.virtual_clients)
    traces = []
    for r in range(ROUNDS):
        clients = m.sample_clients(r, world)
        named = [
            ((c.grouping, c.group), tuple(int(k) for k in world.user_keys[c.users]))
            for c in clients
        ]
        updates = [system.update(members, r) for _, members in named]
        params = system.params(m, updates)
        state = m.initial_sample_state(DIM)
        contributions = {}
        for (place, members), update in zip(named, updates, strict=True):
            record = system.contribute(m, params, update, members)
            contributions[place] = np.asarray(record[0])
            state = m.query.accumulate_preprocessed_record(state, record)
        total = np.asarray(state[0]).copy()
        out = system.aggregate(m, r, state, named)
        mean = np.asarray(out.mean, np.float64)
        traces.append(Trace(contributions, total, drawn.pop(), mean))
    return traces


def _recorded(m: Mechanism) -> list[np.ndarray]:
    """Notes the integer noise of every vector from now on."""
    drawn: list[np.ndarray] = []
    sound = m._noise.add

    def add(name, values, scale):
        out = sound(name, values, scale)
        drawn.append(out - values)
        return out

    m._noise.add = add
    return drawn


def record_replay(system: System) -> list[str]:
    """L1: the same round on neighbouring data sets; nothing statistical."""
    problems = []
    grid, clip = 2.0**system.plan.grid_bits, 1 + 1e-6
    with_target = play(system, USERS | {TARGET}, inject=True)
    without = play(system, USERS, inject=True)
    moved = False
    for r, (there, gone) in enumerate(zip(with_target, without, strict=True)):
        for trace in (there, gone):
            for value in trace.contributions.values():
                if not np.linalg.norm(value / grid) <= clip:
                    problems.append(f"round {r}: a contribution is longer than the clip")
        if there.contributions.keys() != gone.contributions.keys():
            problems.append(f"round {r}: other virtual clients were sampled")
            continue
        changed = [
            place
            for place, value in there.contributions.items()
            if not np.array_equal(value, gone.contributions[place])
        ]
        moved = moved or bool(changed)
        if len(changed) > 1:
            problems.append(f"round {r}: {len(changed)} virtual clients changed")
        if not np.linalg.norm((there.total - gone.total) / grid) <= 2 * clip:
            problems.append(f"round {r}: the sum moved by more than twice the clip")
        if not np.array_equal(there.noise, gone.noise):
            problems.append(f"round {r}: the noise follows the data, not the key")
        step = np.linalg.norm(there.mean - gone.mean) * system.plan.normalizer
        if not step <= 2 * (1 + 1e-4):
            problems.append(f"round {r}: the mean moved by more than twice the clip")
    if not moved:
        problems.append("the target never took part: this test saw nothing")
    return problems


def zero_probe(system: System, dim: int = 20_000) -> list[str]:
    """L2a: zero input; scale, independence of rounds and of processes. 6 sigma: 2e-9 a line."""
    problems = []
    plan = system.plan

    def run(root):
        m = system.mechanism(root)
        outs = [system.aggregate(m, r, m.initial_sample_state(dim), []).mean for r in range(4)]
        return np.array(outs, np.float64) * plan.normalizer

    first, second = run(0), run(1)
    target = plan.noise_multiplier * plan.l2_norm_clip
    for r, row in enumerate(first):
        if not abs(row.std() / target - 1) < 6 / math.sqrt(2 * dim):
            problems.append(
                f"round {r}: noise has standard deviation {row.std():.4g}, not {target:g}"
            )
    rows = np.concatenate([first, second])
    # Rows without any noise have been named above; their correlation is not a number.
    noisy = rows[rows.std(axis=1) > 0]
    correlations = np.corrcoef(noisy) - np.eye(len(noisy)) if len(noisy) > 1 else np.zeros(1)
    if not np.abs(correlations).max() < 6 / math.sqrt(dim):
        problems.append("noise of different rounds or processes is correlated")
    shifted = np.abs(np.mean(first[:, 1:] * first[:, :-1], axis=1)) / target**2
    if not shifted.max() < 6 / math.sqrt(dim - 1):
        problems.append("noise of neighbouring entries is correlated")
    return problems


def replay_with_other_data(system: System, dim: int = 20_000) -> list[str]:
    """The same round again with other sums must not get the same noise; with equal ones it must."""
    zeros = system.mechanism()
    other = system.mechanism()
    again = system.mechanism()
    state = zeros.initial_sample_state(dim)
    bumped = tuple(part + 1 if i == 0 else part for i, part in enumerate(state))
    one, two, same = (
        np.asarray(system.aggregate(m, 0, s, []).mean, np.float64)
        for m, s in ((zeros, state), (other, bumped), (again, copy.deepcopy(state)))
    )
    problems = []
    if not abs(np.corrcoef(one, two)[0, 1]) < 6 / math.sqrt(dim):
        problems.append("other data got correlated noise: subtracting two outputs cancels it")
    if not np.array_equal(one, same):
        problems.append("equal data got other noise: averaging replays removes it")
    return problems


def coin_chi_square(system: System, rounds: int = 300) -> list[str]:
    """Sizes of rounds against Binomial(G, q), and repeats in the next round, both at 1e-6."""
    plan = system.plan
    m = system.mechanism()
    world = system.index(USERS, plan.virtual_clients)
    table = np.zeros((rounds, plan.virtual_clients))
    for r in range(rounds):
        table[r, [client.group for client in m.sample_clients(r, world)]] = 1
    q, groups = plan.sampling_probability, plan.virtual_clients
    problems = []
    statistic = ((table.sum(axis=1) - groups * q) ** 2).sum() / (groups * q * (1 - q))
    tail = chi2.sf(statistic, rounds)
    if not 2 * min(tail, 1 - tail) > 1e-6:
        problems.append(f"sizes of rounds are not binomial: chi-square {statistic:.4g} of {rounds}")
    centred = table - q
    repeats = (centred[1:] * centred[:-1]).sum() / (q * (1 - q))
    if not abs(repeats) < 5 * math.sqrt(groups * (rounds - 1)):
        problems.append("taking part depends on the round before")
    return problems


def recomputation(system: System) -> list[str]:
    """What the gate does: event and epsilon from the plan, compared with what was claimed."""
    # Few rounds, for an epsilon that can be stated; the other layers need many.
    document = system.document(system.plan.replaced(rounds=4))
    plan = plan_from_json(document["plan"])
    claimed = PrivacyGuarantee.from_json(document["guarantee"])
    problems = []
    if event_from_json(document["event"]) != plan.event():
        problems.append("the event is not the plan's")
    if document["relation"] != plan.relation.name or claimed.relation is not plan.relation:
        problems.append("the relation is not the plan's")
    ours = price(plan.event(), plan.relation, claimed.delta).epsilon
    if not abs(claimed.epsilon - ours) <= 0.01 * ours:
        problems.append(f"epsilon {claimed.epsilon:.4g} is claimed, {ours:.4g} recomputed")
    return problems


LAYERS: dict[str, Callable[[System], list[str]]] = {
    "record_replay": record_replay,
    "zero_probe": zero_probe,
    "replay_with_other_data": replay_with_other_data,
    "coin_chi_square": coin_chi_square,
    "recomputation": recomputation,
}
