"""Bugs that happened elsewhere (tests/planted_bugs/README.md), each switched on by a test alone.

A fault takes the sound `System` and returns it with one part replaced. Nothing in the product knows
of this module.
"""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import tensorflow as tf
from layers import TARGET, System, real_document

from fedemb.privacy.accounting.accounting import price
from fedemb.privacy.randomness import sampling
from fedemb.privacy.randomness.noise import add_rounded_noise
from tests.kit.privacy_worlds import World

GRID = 2.0**32


def _whole(values) -> tf.Tensor:
    with np.errstate(invalid="ignore"):
        return tf.constant(np.asarray(values, np.float64).astype(np.int64))


def _flat(update) -> np.ndarray:
    return np.concatenate([np.ravel(part) for part in update])


# 1-3, 13: clipping


def no_clipping(system: System) -> System:
    return dataclasses.replace(
        system, contribute=lambda m, p, update, u: (_whole(_flat(update) * GRID),)
    )


def clip_per_tensor(system: System) -> System:
    def contribute(m, params, update, users):
        parts = [np.ravel(part) / max(1.0, np.linalg.norm(part)) for part in update]
        return (_whole(np.concatenate(parts) * GRID),)

    return dataclasses.replace(system, contribute=contribute)


def clip_before_weighting(system: System) -> System:
    """Weights by the number of users after the clip."""

    def contribute(m, params, update, users):
        (record,) = m.query.preprocess_record(params, update)
        return (record * len(users),)

    return dataclasses.replace(system, contribute=contribute)


def clip_the_sum_only(system: System) -> System:
    sound = no_clipping(system)

    def aggregate(m, r, state, clients):
        total = np.asarray(state[0]) / GRID
        clipped = total / max(1.0, np.linalg.norm(total) / m.plan.normalizer)
        return m.aggregate(r, (_whole(clipped * GRID),))

    return dataclasses.replace(sound, aggregate=aggregate)


def nan_reaches_the_sum(system: System) -> System:
    """The target's presence makes a NaN, which the clip lets through as the least integer."""

    def update(users, r):
        parts = system.update(users, r)
        if TARGET in users:
            parts[0][0, 0] = math.nan
        return parts

    def contribute(m, params, parts, users):
        flat = _flat(parts)
        if np.isfinite(flat).all():
            return m.query.preprocess_record(params, parts)
        return (_whole(np.full(flat.shape, np.nan)),)

    return dataclasses.replace(system, update=update, contribute=contribute)


def retry_on_nan(system: System) -> System:
    """A client that fails is trained again, unclipped, on fewer users."""

    def update(users, r):
        parts = system.update(users, r)
        if TARGET in users:
            raise FloatingPointError
        return parts

    def safe(users, r):
        try:
            return update(users, r)
        except FloatingPointError:
            return [10 * part for part in system.update(tuple(users[:-1]), r)]

    return dataclasses.replace(no_clipping(system), update=safe)


# 4-7, 12: noise


def _with_noise(system: System, add) -> System:
    def prepare(m):
        noise = m._noise
        sound = noise.add
        noise.add = lambda name, values, scale: add(sound, noise, m.plan, name, values, scale)

    return dataclasses.replace(system, prepare=prepare)


def noise_scaled_as_for_the_mean(system: System) -> System:
    return _with_noise(
        system, lambda add, _n, plan, name, v, scale: add(name, v, scale / plan.normalizer)
    )


def variance_for_deviation(system: System) -> System:
    return _with_noise(
        system, lambda add, _n, plan, name, v, scale: add(name, v, scale * plan.noise_multiplier)
    )


def seed_reused_across_rounds(system: System) -> System:
    return _with_noise(
        system, lambda _a, noise, _p, name, v, scale: add_rounded_noise(v, noise._key, scale)
    )


def seed_reused_across_processes(system: System) -> System:
    """As `tf.random.normal` under XLA on a CPU: the same stream in every process."""
    generators = {}

    def add(_a, noise, _p, name, values, scale):
        rng = generators.setdefault(id(noise), np.random.default_rng(0))
        return values + np.rint(rng.normal(size=values.shape) * scale).astype(np.int64)

    return _with_noise(system, add)


def seed_reused_across_entries(system: System) -> System:
    """Each half of the vector is a tensor, and both draw under one key."""

    def add(sound, _n, _p, name, values, scale):
        out = values.copy()
        out[0::2] = sound(name, values[0::2], scale)
        noise = sound(name, np.zeros_like(values[0::2]), scale)[: len(values[1::2])]
        out[1::2] = values[1::2] + noise
        return out

    return _with_noise(system, add)


def noise_ignores_the_data(system: System) -> System:
    """The generator restarts from its seed on a resume, whatever the data."""

    def prepare(m):
        sound = m._noise.begin
        m._noise.begin = lambda r, quantities: sound(
            r, {name: np.zeros_like(values) for name, values in quantities.items()}
        )

    return dataclasses.replace(system, prepare=prepare)


def fresh_noise_on_replay(system: System) -> System:
    counter = iter(range(1000))

    def prepare(m):
        sound = m._noise.begin
        m._noise.begin = lambda r, quantities: sound(r * 1000 + next(counter), quantities)

    return dataclasses.replace(system, prepare=prepare)


def empty_round_is_skipped(system: System) -> System:
    def aggregate(m, r, state, clients):
        if not clients:
            return SimpleNamespace(mean=np.zeros(state[0].shape))
        return m.aggregate(r, state)

    return dataclasses.replace(system, aggregate=aggregate)


# 8-11: grouping, sampling, dividing


class _TwoGroups(World):
    def members(self, grouping, group):
        here = super().members(grouping, group)
        before = super().members(grouping, (group - 1) % self.virtual_clients)
        return np.union1d(here, before)


class _Chunks(World):
    def members(self, grouping, group):
        return np.array_split(np.arange(self.user_count), self.virtual_clients)[group]


def user_in_two_clients(system: System) -> System:
    return dataclasses.replace(system, index=_TwoGroups)


def chunks_of_a_sorted_list(system: System) -> System:
    return dataclasses.replace(system, index=_Chunks)


def divided_by_who_showed_up(system: System) -> System:
    """Users, not virtual clients: the count a weighted mean divides by."""

    def aggregate(m, r, state, clients):
        out = m.aggregate(r, state)
        present = sum(len(users) for _, users in clients) / 3
        return SimpleNamespace(mean=out.mean * m.plan.normalizer / max(1.0, present))

    return dataclasses.replace(system, aggregate=aggregate)


def weighted_by_examples(system: System) -> System:
    def contribute(m, params, update, users):
        (record,) = m.query.preprocess_record(params, update)
        return (tf.cast(tf.cast(record, tf.float64) * (1 + 0.1 * len(users)), tf.int64),)

    return dataclasses.replace(system, contribute=contribute)


class _ExactSize(sampling.Sampler):
    def sample(self, round_index, index):
        rng = np.random.default_rng(round_index)
        count = round(self.plan.normalizer)
        chosen = np.sort(rng.permutation(index.virtual_clients)[:count])
        return [sampling.VirtualClient(0, int(g), index.members(0, int(g))) for g in chosen]


class _ShuffledEpochs(sampling.Sampler):
    def sample(self, round_index, index):
        count = round(self.plan.normalizer)
        epoch, turn = divmod(round_index * count, index.virtual_clients)
        order = np.random.default_rng(epoch).permutation(index.virtual_clients)
        return [
            sampling.VirtualClient(0, int(g), index.members(0, int(g)))
            for g in np.sort(order[turn : turn + count])
        ]


def _with_sampler(system: System, cls) -> System:
    def prepare(m):
        m._sampler = cls(m.plan, bytes(32))

    return dataclasses.replace(system, prepare=prepare)


def fixed_size_priced_as_poisson(system: System) -> System:
    return _with_sampler(system, _ExactSize)


def epochs_priced_as_poisson(system: System) -> System:
    return _with_sampler(system, _ShuffledEpochs)


# 15, 17: price


def naive_sensitivity(system: System) -> System:
    """The published reading: sensitivity C under add-or-remove for grouped clients."""
    from dp_accounting import NeighboringRelation

    def document(plan):
        naive = NeighboringRelation.ADD_OR_REMOVE_ONE
        guarantee = price(plan.event(), naive, 1e-6)
        return real_document(plan) | {
            "relation": naive.name,
            "guarantee": guarantee.to_json(),
        }

    return dataclasses.replace(system, document=document)


def clip_from_the_same_round(system: System) -> System:
    """The clip is the mean of this round's own, un-noised norms."""

    def params(m, updates):
        norms = [float(np.linalg.norm(_flat(update))) for update in updates]
        return tf.constant(np.mean(norms) if norms else 1.0, tf.float64)

    def update(users, r):
        factor = 1.0 if TARGET in users else 0.02 + 0.001 * (sum(users) % 7)
        return [factor * part for part in system.update(users, r)]

    return dataclasses.replace(system, params=params, update=update)


FAULTS = [
    (1, no_clipping, "record_replay"),
    (2, clip_per_tensor, "record_replay"),
    (3, clip_before_weighting, "record_replay"),
    (3, clip_the_sum_only, "record_replay"),
    (4, noise_scaled_as_for_the_mean, "zero_probe"),
    (5, variance_for_deviation, "zero_probe"),
    (6, seed_reused_across_rounds, "zero_probe"),
    (6, seed_reused_across_processes, "zero_probe"),
    (6, seed_reused_across_entries, "zero_probe"),
    (7, noise_ignores_the_data, "replay_with_other_data"),
    (7, fresh_noise_on_replay, "replay_with_other_data"),
    (8, user_in_two_clients, "record_replay"),
    (9, chunks_of_a_sorted_list, "record_replay"),
    (10, divided_by_who_showed_up, "record_replay"),
    (10, weighted_by_examples, "record_replay"),
    (11, fixed_size_priced_as_poisson, "coin_chi_square"),
    (11, epochs_priced_as_poisson, "coin_chi_square"),
    (12, empty_round_is_skipped, "zero_probe"),
    (13, nan_reaches_the_sum, "record_replay"),
    (13, retry_on_nan, "record_replay"),
    (15, naive_sensitivity, "recomputation"),
    (17, clip_from_the_same_round, "record_replay"),
]
"""Number in tests/planted_bugs/README.md, fault, layer that must go red."""
